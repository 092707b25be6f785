// Paged prefill and append: several query tokens of each request, the last ones of its length,
// attend causally to the pages of its block table.
//
// A block takes 128 query rows of one kv head, or 64 of heads wider than 128; a row is a query
// token and a head of the group. It goes through the tiles that any row sees, two at a step. Each of
// its four warps has 32 rows, or 16. Shared memory has its queries and two stages, each for a step's
// keys and values: one is filled while the other is in use. Blocks with later rows, which see more
// tokens, come first (FlashAttention-2, arXiv 2307.08691).
#include <climits>

#include "attend.h"
#include "batch.h"

namespace tierd {

constexpr int kPrefillWarps = 4;

struct PrefillParams {
  Batch batch;  // subsets: of a request and kv head, the same for all its query tokens
  Pool pool;
  const void* q;            // [tokens][q_heads][dim]
  const int* query_starts;  // [requests + 1]: the query tokens of request i are query_starts[i] to query_starts[i + 1]
  void* out;                // [tokens][q_heads][dim]
  float* lse;               // [tokens][q_heads], natural
  const float *k_scales, *v_scales;  // null, or [kv_heads]
  int q_heads;
  float scale_log2;
};

template <class Query, class Stored, int kDim> struct Prefill {
  static constexpr int kSets = kDim > 128 ? 1 : 2, kRows = 16 * kSets, kBlockRows = kRows * kPrefillWarps;
  using Attend = Attention<Query, Stored, kDim, kSets>;
  using KvTile = Tile<Stored, kDim>;
  static constexpr int kThreads = 32 * kPrefillWarps;
  static constexpr int kResident = kDim > 64 ? 2 : 3;  // stated, or ptxas spills to fit one more
  static constexpr int kStageBytes = 2 * kStepTiles * KvTile::kBytes;
  static constexpr int kNowhere = INT_MAX - kTileTokens;

  // What a block does. It is in shared memory: no thread has registers for it.
  struct Work {
    int request, head, begin, before;  // before: tokens that were there before the queries
    int group, first_row, last_row, end;  // end: of the tokens that the block sees
    int oldest[kPrefillWarps], newest[kPrefillWarps];  // positions of a warp's first and last row; -1 as newest if it has none
    float scale;  // of scores, in units of log2
    TileList tiles;

    // The first token of a tile; of absent ones a token that no query sees.
    SIMT_DEV int first_token(int tile) const { return tile < tiles.count ? tiles.first_token(tile) : kNowhere; }
    SIMT_DEV int position_of(int row) const { return before + row / group; }
    // Of a row among all tokens and query heads.
    SIMT_DEV int64_t place(const PrefillParams& p, int row) const { return (int64_t)(begin + row / group) * p.q_heads + head * group + row % group; }
    SIMT_DEV int my_first() const { return first_row + kRows * simt::warp(); }
    // The row r of a set of this lane.
    SIMT_DEV int row_of(int s, int r) const { return my_first() + 16 * s + 8 * r + (simt::lane() >> 2); }
  };
  static constexpr int kWorkBytes = 128;
  static_assert(sizeof(Work) <= kWorkBytes);

  // Of a step's four tiles, two of keys and two of values, each warp loads one. Tokens that the block
  // does not see are zeros.
  static SIMT_DEV void load(const PrefillParams& p, const Work& work, int step, unsigned char* stages) {
    const int tile = simt::warp() % kStepTiles, token = work.first_token(kStepTiles * step + tile);
    const bool is_key = simt::warp() < kStepTiles;
    int64_t at = 0;
    if (token < work.end) {
      const int64_t id = page_of(p.batch, p.pool, work.request, token);
      at = id * p.pool.page_stride + work.head * p.pool.head_stride + token % p.pool.page_tokens * p.pool.token_stride;
    }
    int lane = simt::lane();
    simt::forget(lane);
    unsigned char* const to = stages + step % 2 * kStageBytes + (is_key ? 0 : kStepTiles * KvTile::kBytes) + tile * KvTile::kBytes;
    KvTile::load(to, (is_key ? p.pool.k : p.pool.v) + at, p.pool.token_stride, work.end - token, lane);
    simt::commit_copies();
  }

  // The caller states the most rows that a request has. Rows beyond that have no block and become
  // NaN, so that nobody takes them for results. To compute them here would take a register that
  // wide heads do not have.
  static SIMT_DEV void spoil_rest(const PrefillParams& p, const Work& work, int covered, int rows) {
    for (int row = covered + threadIdx.x; row < rows; row += kThreads) {
      p.lse[work.place(p, row)] = NAN;
      for (int channel = 0; channel < kDim; channel++) static_cast<typename Query::Value*>(p.out)[work.place(p, row) * kDim + channel] = Query::round(NAN);
    }
  }

  static SIMT_DEV void run(const PrefillParams& p) {
    SIMT_SHARED(raw);
    const int row_blocks = gridDim.x / p.batch.kv_heads, at = row_blocks - 1 - blockIdx.x / p.batch.kv_heads;
    Work work{int(blockIdx.y), int(blockIdx.x % p.batch.kv_heads), p.query_starts[blockIdx.y]};
    const int tokens = p.query_starts[work.request + 1] - work.begin, length = p.batch.kv_lens[work.request];
    SIMT_CHECK(work.begin >= 0 && tokens >= 0 && tokens <= length, "sequence %d: %d query tokens of %d, from the %d-th on", work.request, tokens, length, work.begin);
    work.group = p.q_heads / p.batch.kv_heads, work.before = length - tokens;
    if (at == row_blocks - 1) spoil_rest(p, work, row_blocks * kBlockRows, tokens * work.group);
    work.first_row = at * kBlockRows, work.last_row = min(work.first_row + kBlockRows, tokens * work.group) - 1;
    if (work.first_row > work.last_row) return;
    work.end = work.position_of(work.last_row) + 1;
    work.tiles = tiles_of(p.batch, p.pool.page_tokens, work.request, work.head, work.position_of(work.first_row) - p.batch.window + 1);
    if (!work.tiles.subset) work.tiles.count = tiles_for(work.end) - work.tiles.skipped;
    for (int warp = 0; warp < kPrefillWarps; warp++) {
      const int row = work.first_row + kRows * warp;
      work.oldest[warp] = work.position_of(row);
      work.newest[warp] = row > work.last_row ? -1 : work.position_of(min(row + kRows - 1, work.last_row));
    }
    work.scale = p.scale_log2 * (p.k_scales ? p.k_scales[work.head] : 1.f);
    if (threadIdx.x == 0) *reinterpret_cast<Work*>(raw) = work;
    __syncthreads();
    attend(p, *reinterpret_cast<const Work*>(raw), raw + kWorkBytes);
  }

  static SIMT_DEV void attend(const PrefillParams& p, const Work& work, unsigned char* room) {
    unsigned char* const queries = room + simt::warp() * kSets * Attend::QueryTile::kBytes;
    unsigned char* const stages = room + kPrefillWarps * kSets * Attend::QueryTile::kBytes;
    load(p, work, 0, stages);
    Attend::load_queries(queries, [&](int i) {
      const int row = work.my_first() + i;
      return row > work.last_row ? nullptr : static_cast<const typename Query::Value*>(p.q) + work.place(p, row) * kDim;
    });
    Attend attention;
    attention.begin();
    for (int step = 0; step * kStepTiles < work.tiles.count; step++) {
      simt::await_copies<0>();
      __syncthreads();  // this step is there, and no warp reads the one before
      load(p, work, step + 1, stages);
      const Sight sight = sight_of(p, work, step);
      if (sight == kNone) continue;
      const unsigned char* const keys = stages + step % 2 * kStageBytes;
      attention.multiply_keys(queries, keys, work.scale);
      if (sight == kSome) mask(p, work, step, attention);
      attention.multiply_values(keys + kStepTiles * KvTile::kBytes);
    }
    simt::await_copies<0>();
    attention.finish();
    put(p, work, attention);
  }

  // What a warp's rows see of a step: nothing, some tokens, or all rows all.
  enum Sight { kNone, kSome, kAll };
  static SIMT_DEV Sight sight_of(const PrefillParams& p, const Work& work, int step) {
    const int oldest = work.oldest[simt::warp()], newest = work.newest[simt::warp()];
    bool sees_any = false, sees_all = true;
#pragma unroll
    for (int i = 0; i < kStepTiles; i++) {
      const int first = work.first_token(step * kStepTiles + i), last = first + kTileTokens - 1;
      sees_any |= first <= newest;
      sees_all &= last <= oldest && (!p.batch.window || last < p.batch.sinks || first > newest - p.batch.window);
    }
    return sees_any ? sees_all ? kAll : kSome : kNone;
  }

  static SIMT_DEV void mask(const PrefillParams& p, const Work& work, int step, Attend& attention) {
    int positions[kSets][2];
    const uint32_t span = p.batch.window ? p.batch.window : 1u << 31;
#pragma unroll
    for (int i = 0; i < 2 * kSets; i++) positions[i / 2][i % 2] = work.position_of(work.row_of(i / 2, i % 2));
    attention.mask([&](int tile) { return work.first_token(step * kStepTiles + tile); },
                   [&](int s, int r, int token) {
                     const int age = positions[s][r] - token;
                     return (uint32_t(age) < span) | ((age >= 0) & (token < p.batch.sinks));
                   });
  }

  static SIMT_DEV void put(const PrefillParams& p, const Work& work, const Attend& attention) {
    const float v_scale = p.v_scales ? p.v_scales[work.head] : 1.f;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = work.row_of(s, r);
        if ((simt::lane() & 3) == 0 && row <= work.last_row)
          p.lse[work.place(p, row)] = lse_of(attention.base[s][r], log2f(attention.sum[s][r]), attention.sum[s][r]) * kLn2;
      }
    attention.each_out([&](int s, int r, int channel, float value) {
      const int row = work.row_of(s, r);
      if (row <= work.last_row)
        static_cast<typename Query::Value*>(p.out)[work.place(p, row) * kDim + channel] = Query::round(value * inverse_of(attention.sum[s][r], v_scale));
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
