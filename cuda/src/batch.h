// The tokens that a request's queries attend to, as a list of tiles.
#pragma once
#include "tile.h"

namespace tierd {

// Keys or values of one layer in a pool of pages; strides in bytes. A page is page_tokens
// consecutive tokens of a request.
struct Pool {
  const unsigned char *k, *v;
  int64_t page_stride, token_stride, head_stride;
  int page_tokens, pages;  // pages: their number, for a checked build
};

// kv_lens: [requests]. tables: [requests][table_stride] page ids in order.
// Entries behind a request's length are never read.
// sinks, window: a query sees the first `sinks` tokens and the last `window` ones up to itself.
// A window of 0 shows all tokens.
// subsets: null, or [requests * kv_heads][subset_stride] ordinals of the pages to attend to,
// subset_sizes of them each.
// They exclude a window.
struct Batch {
  const int *kv_lens, *tables, *subsets, *subset_sizes;
  int requests, kv_heads, table_stride, subset_stride, sinks, window;
};

SIMT_DEV int tiles_for(int tokens) { return (tokens + kTileTokens - 1) / kTileTokens; }

// The id of the page of a request's token.
SIMT_DEV int page_of(const Batch& batch, const Pool& pool, int request, int token) {
  const int at = token / pool.page_tokens, id = batch.tables[(int64_t)request * batch.table_stride + at];
  SIMT_CHECK(id >= 0 && id < pool.pages, "row %d of the tables, page %d: id %d, and the pool has %d pages", request, at, id, pool.pages);
  return id;
}

// The tiles of one request and kv head that a query sees. Tile i begins at token first_token(i).
struct TileList {
  const int* subset;
  int page_tiles, skipped_from, skipped, count;

  SIMT_DEV int first_token(int i) const {
    if (subset) return (subset[i / page_tiles] * page_tiles + i % page_tiles) * kTileTokens;
    return (i < skipped_from ? i : i + skipped) * kTileTokens;
  }
};

// oldest: the first token behind the sinks that the oldest query sees.
SIMT_DEV TileList tiles_of(const Batch& batch, int page_tokens, int request, int head, int oldest) {
  const int length = batch.kv_lens[request], page_tiles = page_tokens / kTileTokens;
  SIMT_CHECK(length >= 0 && length <= (int64_t)batch.table_stride * page_tokens, "row %d of the tables: %d tokens, and it has room for %d pages of %d", request, length,
             batch.table_stride, page_tokens);
  if (batch.subsets) {
    const int row = request * batch.kv_heads + head;
    const int pages = length > 0 ? batch.subset_sizes[row] : 0;
#if defined(TIERD_CHECKED)
    SIMT_CHECK(pages >= 0 && pages <= batch.subset_stride, "request %d, kv head %d: %d chosen pages, and there is room for %d", request, head, pages, batch.subset_stride);
    for (int i = 0; i < pages; i++) {
      const int chosen = batch.subsets[(int64_t)row * batch.subset_stride + i];
      SIMT_CHECK(chosen >= 0 && chosen < batch.table_stride, "request %d, kv head %d: chosen page %d of a table of %d", request, head, chosen, batch.table_stride);
    }
#endif
    return {batch.subsets + (int64_t)row * batch.subset_stride, page_tiles, 0, 0, pages * page_tiles};
  }
  const int all = tiles_for(length), near_sinks = min(tiles_for(batch.sinks), all), first = min(max(oldest, 0) / kTileTokens, all);
  const int skipped = batch.window ? max(0, first - near_sinks) : 0;
  return {nullptr, page_tiles, near_sinks, skipped, all - skipped};
}

// Whether a query at `position` sees a token at or before it.
SIMT_DEV bool is_in_window(const Batch& batch, int token, int position) {
  return !batch.window || token < batch.sinks || token > position - batch.window;
}

}  // namespace tierd
