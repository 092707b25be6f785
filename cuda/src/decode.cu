// The decode kernels (`decode.h`) for pages of 16-bit or e4m3 values, and the page masses.
#include "decode.h"

namespace tierd {

struct MassParams {
  Batch batch;
  const float *tile_lse, *lse;  // of decode (log2) and of its result (natural)
  float* mass;                  // [requests][q_heads][table_stride]: the attention weight of each page is added
  int q_heads, page_tokens;
};

// A block takes a row and some of its tiles. It sums the weights of tiles over each page, one query
// head after another.
SIMT_DEV void page_mass(const MassParams& p) {
  const int row = blockIdx.x, group = p.q_heads / p.batch.kv_heads, page_tiles = p.page_tokens / kTileTokens, length = p.batch.kv_lens[row / p.batch.kv_heads];
  const TileList tiles = tiles_of(p.batch, p.page_tokens, row / p.batch.kv_heads, row % p.batch.kv_heads, length - p.batch.window);
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= tiles.count) return;
  const int token = tiles.first_token(i), page = token / p.page_tokens;
  // The first visible tile of each page sums those that follow.
  if (token >= length || (i > 0 && tiles.first_token(i - 1) / p.page_tokens == page)) return;
  const float* tile_lse = p.tile_lse + (int64_t)row * p.batch.table_stride * page_tiles * group;
  for (int head = 0; head < group; head++) {
    const int64_t of_all = (int64_t)row * group + head;
    // Scores of -inf alone have no weight.
    const float lse = p.lse[of_all], whole = lse == -INFINITY ? 0.f : lse / kLn2;
    float sum = 0.f;
    for (int j = i; j < tiles.count && j < i + page_tiles; j++) {
      const int at = tiles.first_token(j);
      if (at / p.page_tokens != page) break;
      sum += simt::exp2_fast(tile_lse[at / kTileTokens * group + head] - whole);
    }
    p.mass[of_all * p.batch.table_stride + page] += sum;
  }
}

// kSets: sets of eight query heads for a kv head.
template <class Query, class Stored, int kDim, int kSets> struct Shape {
  static constexpr int kWarps = kDim > 128 ? 2 : 4;  // the rings of two blocks fit an H100's multiprocessor
  // Stated, or ptxas spills to fit one more block. Shared memory allows as many blocks anyway, if
  // the registers do.
  static constexpr int kResident = kDim > 128 ? 3 : kDim == 64 ? (kSets > 1 ? 3 : 4) : Stored::kBytes == 2 || kSets > 1 ? 2 : 3;
  using Kernel = Decode<TurnedAttention<Query, Stored, kDim, kSets>, kWarps>;
};

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(decode_page_mass, MassParams, 128, page_mass)

#define DECODE_AS(NAME, QUERY, STORED, DIM, SETS, TELLS)                                                          \
  SIMT_RESIDENT_KERNEL(NAME, DecodeParams, (Shape<QUERY, STORED, DIM, SETS>::Kernel::kThreads),                  \
                       (Shape<QUERY, STORED, DIM, SETS>::kResident), (Shape<QUERY, STORED, DIM, SETS>::Kernel::run<TELLS>))
#define DECODE(QUERY, Q, STORED, KV, DIM)                                   \
  DECODE_AS(decode_##Q##_##KV##_##DIM, QUERY, STORED, DIM, 1, false)       \
  DECODE_AS(decode_##Q##_##KV##_##DIM##_mass, QUERY, STORED, DIM, 1, true) \
  DECODE_AS(decode_##Q##_##KV##_##DIM##_wide, QUERY, STORED, DIM, 2, false) \
  DECODE_AS(decode_##Q##_##KV##_##DIM##_wide_mass, QUERY, STORED, DIM, 2, true)
#define DECODE_DIM(DIM) TIERD_TYPES(DECODE, DIM)

TIERD_DIMS(DECODE_DIM)
