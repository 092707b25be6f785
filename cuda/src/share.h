// Shares out the tiles of a decode among blocks.
//
// The tiles of all requests and kv heads form one list, of which each block has a run. A row is a
// request and a kv head. Every block counts all tiles itself, with no launch before it, so that a
// captured graph replays with growing lengths.
#pragma once
#include "batch.h"

namespace tierd {

constexpr int kMinRun = 4;  // tiles: shorter runs cost more in partial results than they save

// The run of one block; all but the last are equally long.
struct Run {
  int first, last, length;

  static SIMT_DEV Run of(int block, int tiles, int blocks) {
    const int length = max(kMinRun, (tiles + blocks - 1) / blocks);
    return {min(block * length, tiles), min((block + 1) * length, tiles), length};
  }
};

// A row's tiles, and their place in the list. Its query heads start at number * group of all
// requests'. A thread always keeps two rows: recomputing a value costs less than a register.
struct Row {
  int number, begin, end, skipped_from, skipped;

  static SIMT_DEV Row of(const Batch& batch, int page_tokens, int number, int begin) {
    const int request = number / batch.kv_heads;
    const TileList tiles = tiles_of(batch, page_tokens, request, number % batch.kv_heads, batch.kv_lens[request] - batch.window);
    return {number, begin, begin + tiles.count, tiles.skipped_from, tiles.skipped};
  }
  // tile: its number in the list.
  SIMT_DEV int first_token(const Batch& batch, int page_tokens, int tile) const {
    const int* subset = batch.subsets ? batch.subsets + (int64_t)number * batch.subset_stride : nullptr;
    return TileList{subset, page_tokens / kTileTokens, skipped_from, skipped, 0}.first_token(tile - begin);
  }
  // Moves on to the row of a tile, which is this row or a later one.
  SIMT_DEV void advance(const Batch& batch, int page_tokens, int tile) {
    while (tile >= end) *this = of(batch, page_tokens, number + 1, end);
  }
};

// A block's run, and the row of its first tile, if there is one.
struct Share {
  Run run;
  Row row;

  static SIMT_DEV int tiles_of_request(const Batch& batch, int page_tokens, int request) {
    const auto count = [&](int head) { return tiles_of(batch, page_tokens, request, head, batch.kv_lens[request] - batch.window).count; };
    if (!batch.subsets) return batch.kv_heads * count(0);
    int sum = 0;
    for (int head = 0; head < batch.kv_heads; head++) sum += count(head);
    return sum;
  }

  // All threads of a block call it. shared: an int for each warp and two more, for this call alone.
  template <int kThreads> static SIMT_DEV Share of(const Batch& batch, int page_tokens, int* shared) {
    const int me = threadIdx.x, each = (batch.requests + kThreads - 1) / kThreads;
    const int from = min(me * each, batch.requests), to = min(from + each, batch.requests);
    int mine = 0;
    for (int request = from; request < to; request++) mine += tiles_of_request(batch, page_tokens, request);
    int sum = mine;  // of this warp's lanes up to this one
    for (int by = 1; by < 32; by *= 2) {
      const int before = __shfl_up_sync(~0u, sum, by);
      sum += simt::lane() >= by ? before : 0;
    }
    if (simt::lane() == 31) shared[simt::warp()] = sum;
    __syncthreads();
    int begin = sum - mine, tiles = 0;
    for (int warp = 0; warp < kThreads / 32; warp++) begin += warp < simt::warp() ? shared[warp] : 0, tiles += shared[warp];
    const Run run = Run::of(blockIdx.x, tiles, gridDim.x);
    int* row = shared + kThreads / 32;  // its number and its first tile
    if (begin <= run.first && run.first < begin + mine) {
      int request = from, tiles_there;
      for (; begin + (tiles_there = tiles_of_request(batch, page_tokens, request)) <= run.first; request++) begin += tiles_there;
      // Without subsets all heads of a request have the same number of tiles.
      const int each_head = tiles_there / batch.kv_heads, head = batch.subsets ? 0 : (run.first - begin) / each_head;
      Row found = Row::of(batch, page_tokens, request * batch.kv_heads + head, begin + head * each_head);
      found.advance(batch, page_tokens, run.first);
      row[0] = found.number, row[1] = found.begin;
    }
    __syncthreads();
    return {run, run.first < run.last ? Row::of(batch, page_tokens, row[0], row[1]) : Row{}};
  }
};

}  // namespace tierd
