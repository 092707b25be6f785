// Paged prefill and append: several query tokens of each request, the last ones of its length,
// attend causally to the pages of its block table.
//
// A block takes 64 query rows of one kv head; a row is a query token and a head of the group. It
// goes through the tiles that any row sees. Each of its four warps has 16 rows. Shared memory has
// two stages of four tiles, or of two if there is no room. One stage is filled while the other is
// in use (FlashAttention-2, arXiv 2307.08691).
#include "attend.h"
#include "batch.h"

namespace tierd {

constexpr int kPrefillWarps = 4, kBlockRows = 16 * kPrefillWarps;

struct PrefillParams {
  Batch batch;  // subsets: of a request and kv head, the same for all its query tokens
  Pool pool;
  const void* q;            // [tokens][q_heads][dim]
  const int* query_starts;  // [requests + 1]: the query tokens of request i are query_starts[i] to query_starts[i + 1]
  void* out;                // [tokens][q_heads][dim]
  float* lse;               // [tokens][q_heads], natural
  const float *k_scales, *v_scales;  // null, or [kv_heads]
  int q_heads;
  int stage_tiles;  // 4 or 2
  float scale_log2;
};

template <class Query, class Stored, int kDim> struct Prefill {
  using KvTile = Tile<Stored, kDim>;
  static constexpr int kThreads = 32 * kPrefillWarps;
  static constexpr int kResident = kDim > 128 ? 1 : kDim > 64 ? 3 : 4;  // stated, or ptxas spills to fit one more

  // A warp loads one tile of K and the same of V. In stages with fewer tiles than warps it loads
  // one of the two.
  static SIMT_DEV void load(const PrefillParams& p, const TileList& tiles, int request, int head, int stage, unsigned char* to) {
    const int mine = simt::warp() & (p.stage_tiles - 1), length = p.batch.kv_lens[request], tile = stage * p.stage_tiles + mine;
    if (tile < tiles.count) {
      const int token = tiles.first_token(tile), rows = length - token;
      const int64_t id = rows > 0 ? page_of(p.batch, p.pool, request, token) : 0;
      const int64_t at = id * p.pool.page_stride + head * p.pool.head_stride + (token % p.pool.page_tokens) * p.pool.token_stride;
      unsigned char* k = to + 2 * mine * KvTile::kBytes;
      const bool brings_k = simt::warp() < p.stage_tiles, brings_v = simt::warp() >= kPrefillWarps - p.stage_tiles;
      if (brings_k) KvTile::load(k, p.pool.k + at, p.pool.token_stride, rows);
      if (brings_v) KvTile::load(k + KvTile::kBytes, p.pool.v + at, p.pool.token_stride, rows);
    }
    simt::commit_copies();
  }

  // The caller states the most rows that a request has. Rows beyond that have no block and become
  // NaN, so that nobody takes them for results. To compute them here would take a register that
  // wide heads do not have.
  static SIMT_DEV void spoil_rest(const PrefillParams& p) {
    const int begin = p.query_starts[blockIdx.z], tokens = p.query_starts[blockIdx.z + 1] - begin, group = p.q_heads / p.batch.kv_heads;
    SIMT_CHECK(begin >= 0 && tokens >= 0 && tokens <= p.batch.kv_lens[blockIdx.z], "sequence %u: %d query tokens of %d, from the %d-th on", blockIdx.z, tokens,
               p.batch.kv_lens[blockIdx.z], begin);
    for (int row = gridDim.x * kBlockRows + threadIdx.x; row < tokens * group; row += kThreads) {
      const int64_t place = (int64_t)(begin + row / group) * p.q_heads + blockIdx.y * group + row % group;
      p.lse[place] = NAN;
      for (int channel = 0; channel < kDim; channel++) static_cast<typename Query::Value*>(p.out)[place * kDim + channel] = Query::round(NAN);
    }
  }

  static SIMT_DEV void run(const PrefillParams& p) {
    SIMT_SHARED(raw);
    if (blockIdx.x == gridDim.x - 1) spoil_rest(p);
    const int request = blockIdx.z, head = blockIdx.y, group = p.q_heads / p.batch.kv_heads;
    const int begin = p.query_starts[request], tokens = p.query_starts[request + 1] - begin, first_row = blockIdx.x * kBlockRows;
    if (first_row >= tokens * group) return;
    const int length = p.batch.kv_lens[request], before = length - tokens;  // tokens that were there before the queries
    const int last_row = min(first_row + kBlockRows, tokens * group) - 1;
    const int newest = before + last_row / group, oldest = before + first_row / group;
    const TileList tiles = tiles_of(p.batch, p.pool.page_tokens, request, head, oldest - p.batch.window + 1);
    const int my_first = first_row + 16 * simt::warp();

    Queries<Stored, kDim> q;
    q.template load<Query>([&](int i) -> const typename Query::Value* {
      const int row = my_first + i;
      if (row > last_row) return nullptr;
      return static_cast<const typename Query::Value*>(p.q) + ((int64_t)(begin + row / group) * p.q_heads + head * group + row % group) * kDim;
    });
    Attention<Query, Stored, kDim> attention;
    attention.begin();
    const float scale = p.scale_log2 * (p.k_scales ? p.k_scales[head] : 1.f);
    const int stages = (tiles.count + p.stage_tiles - 1) / p.stage_tiles, stage_bytes = 2 * p.stage_tiles * KvTile::kBytes;
    load(p, tiles, request, head, 0, raw);
    for (int stage = 0; stage < stages; stage++) {
      load(p, tiles, request, head, stage + 1, raw + (stage + 1) % 2 * stage_bytes);
      simt::await_copies<1>();
      __syncthreads();
      const unsigned char* here = raw + stage % 2 * stage_bytes;
      for (int i = 0; i < p.stage_tiles && stage * p.stage_tiles + i < tiles.count; i++) {
        const int first = tiles.first_token(stage * p.stage_tiles + i);
        if (first > newest) continue;
        attention.add(
            q, here + 2 * i * KvTile::kBytes, here + (2 * i + 1) * KvTile::kBytes, scale,
            [&](int row, int token) {
              const int position = before + (my_first + row) / group;
              return first + token <= position && is_in_window(p.batch, first + token, position);
            });
      }
      __syncthreads();  // before this stage is filled again
    }
    simt::await_copies<0>();
    attention.finish();
    put(p, attention, begin, head, my_first, last_row);
  }

  static SIMT_DEV void put(const PrefillParams& p, const Attention<Query, Stored, kDim>& attention, int begin, int head, int my_first, int last_row) {
    const int group = p.q_heads / p.batch.kv_heads;
    const auto place = [&](int row) { return (int64_t)(begin + row / group) * p.q_heads + head * group + row % group; };
    const float v_scale = p.v_scales ? p.v_scales[head] : 1.f;
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r] = inverse_of(attention.rounded[r], v_scale);
      const int row = my_first + (simt::lane() >> 2) + 8 * r;
      if ((simt::lane() & 3) == 0 && row <= last_row)
        p.lse[place(row)] = lse_of(attention.top[r], log2f(attention.sum[r]), attention.sum[r]) * kLn2;
    }
    attention.each_out([&](int i, int channel, float value) {
      if (my_first + i <= last_row) static_cast<typename Query::Value*>(p.out)[place(my_first + i) * kDim + channel] = Query::round(value * scale[i >> 3]);
    });
  }
};

}  // namespace tierd

using namespace tierd;

#define PREFILL(QUERY, Q, STORED, KV, DIM) \
  SIMT_RESIDENT_KERNEL(prefill_##Q##_##KV##_##DIM, PrefillParams, (Prefill<QUERY, STORED, DIM>::kThreads), \
                       (Prefill<QUERY, STORED, DIM>::kResident), (Prefill<QUERY, STORED, DIM>::run))
#define PREFILL_DIM(DIM) TIERD_TYPES(PREFILL, DIM)

TIERD_DIMS(PREFILL_DIM)
