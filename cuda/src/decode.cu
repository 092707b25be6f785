// Paged decode: one query token of each request attends to the pages of its block table, wherever they lie in the pool.
//
// The tiles of all requests and kv heads form one list, which the grid's blocks share out in equal runs (`plan` makes the sums on the device, so that a
// captured graph replays with growing lengths). A run may cross requests; each part of one leaves a partial result, and `decode_merge` joins them by their
// log-sum-exps (FlashDecoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005, section 3.3). Within a block each warp takes every fourth tile and has its
// own ring of tiles in shared memory, filled ahead across requests: no barrier in the loop but the warp's own. The ring is as long as the caller has shared
// memory for: one tile is worked on while one or two are under way.
#include "attend.h"
#include "batch.h"

namespace tierd {

constexpr int kMinRun = 8;  // tiles: shorter ones cost more in partial results than they save

struct PlanParams {
  Batch batch;
  int page_tokens;
  int* starts;  // [requests * kv_heads + 1]: tiles before each row, a row being a request and a kv head
};

struct DecodeParams {
  Batch batch;
  Pool pool;
  const void* q;       // [requests][q_heads][dim]
  const int* starts;
  float *out, *lse;    // partial results: [blocks + rows][group][dim], [blocks + rows][group] (log2)
  float* tile_lse;     // null, or [requests][q_heads][table_stride * page_tokens / 16] (log2), written for the tiles of the list
  const float* k_scales;  // null, or [kv_heads]: what stored keys are multiplied by
  int q_heads;
  int ring;  // 2 or 3: tiles of K and V that a warp has in shared memory
  float scale_log2;
};

struct DecodeMergeParams {
  const int* starts;
  const float *out, *lse;
  const float* v_scales;  // null, or [kv_heads]: what stored values are multiplied by
  void* to;               // [requests][q_heads][dim]
  float* lse_to;          // [requests][q_heads], natural
  int rows, kv_heads, blocks, group, dim;
};

struct MassParams {
  Batch batch;
  const float *tile_lse, *lse;  // of decode (log2) and of the merge (natural)
  float* mass;                  // [requests][q_heads][table_stride]: the attention weight of each page; 0 where nothing of it is seen
  int q_heads, page_tokens;
};

// The run of tiles of one block: all but the last are equally long.
struct Run {
  int first, last;
  static SIMT_DEV int length(int tiles, int blocks) { return max(kMinRun, (tiles + blocks - 1) / blocks); }
  static SIMT_DEV Run of(int block, int tiles, int blocks) {
    const int each = length(tiles, blocks);
    return {min(block * each, tiles), min((block + 1) * each, tiles)};
  }
};

constexpr int kPlanThreads = 256;

SIMT_DEV void plan(const PlanParams& p) {
  SIMT_SHARED(raw);
  int* sums = reinterpret_cast<int*>(raw);  // [kPlanThreads]
  const int rows = p.batch.requests * p.batch.kv_heads, me = threadIdx.x, each = (rows + kPlanThreads - 1) / kPlanThreads;
  const int first = min(me * each, rows), last = min(first + each, rows);
  int mine = 0;
  for (int row = first; row < last; row++) {
    const int request = row / p.batch.kv_heads;
    mine += tiles_of(p.batch, p.page_tokens, request, row % p.batch.kv_heads, p.batch.kv_lens[request] - p.batch.window).count;
  }
  sums[me] = mine;
  __syncthreads();
  for (int by = 1; by < kPlanThreads; by *= 2) {
    const int before = me >= by ? sums[me - by] : 0;
    __syncthreads();
    sums[me] += before;
    __syncthreads();
  }
  int sum = sums[me] - mine;
  for (int row = first; row < last; row++) {
    const int request = row / p.batch.kv_heads;
    p.starts[row] = sum;
    sum += tiles_of(p.batch, p.page_tokens, request, row % p.batch.kv_heads, p.batch.kv_lens[request] - p.batch.window).count;
  }
  if (me == kPlanThreads - 1) p.starts[rows] = sums[me];
}

// A row's tiles, and where in the list of all they stand. Its query heads are `group` of all requests' from number * group on. A thread has two of them all
// the time: what can be found anew costs less than its register.
struct Row {
  int number, begin, end, skipped_from, skipped;

  static SIMT_DEV Row of(const DecodeParams& p, int number) {
    const int request = number / p.batch.kv_heads, head = number % p.batch.kv_heads;
    const TileList tiles = tiles_of(p.batch, p.pool.page_tokens, request, head, p.batch.kv_lens[request] - p.batch.window);
    return {number, p.starts[number], p.starts[number + 1], tiles.skipped_from, tiles.skipped};
  }
  // tile: of all.
  SIMT_DEV int first_token(const DecodeParams& p, int tile) const {
    const int* subset = p.batch.subsets ? p.batch.subsets + (int64_t)number * p.batch.subset_stride : nullptr;
    return TileList{subset, p.pool.page_tokens / kTileTokens, skipped_from, skipped, 0}.first_token(tile - begin);
  }
  // The row that a tile is of, from this one on.
  SIMT_DEV void advance(const DecodeParams& p, int tile) {
    int next = number;
    while (tile >= p.starts[next + 1]) next++;
    if (next != number) *this = of(p, next);
  }
};

// The row that holds a tile: the last whose tiles begin at it or before, and that has any.
SIMT_DEV int row_of(const int* starts, int rows, int tile) {
  int low = 0, high = rows;  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= tile ? low : high) = middle;
  }
  return low;
}

template <class Query, class Stored, int kDim, int kWarps> struct Decode {
  using KvTile = Tile<Stored, kDim>;
  static constexpr int kSlot = 2 * KvTile::kBytes, kThreads = 32 * kWarps;

  static SIMT_DEV void load(const DecodeParams& p, const Row& row, int tile, bool is_there, unsigned char* slot) {
    if (is_there) {
      const int request = row.number / p.batch.kv_heads, head = row.number % p.batch.kv_heads;
      const int token = row.first_token(p, tile), page = token / p.pool.page_tokens, rows = p.batch.kv_lens[request] - token;
      const int64_t id = rows > 0 ? p.batch.tables[(int64_t)request * p.batch.table_stride + page] : 0;
      const int64_t at = id * p.pool.page_stride + head * p.pool.head_stride + (token % p.pool.page_tokens) * p.pool.token_stride;
      KvTile::load(slot, p.pool.k + at, p.pool.token_stride, rows);
      KvTile::load(slot + KvTile::kBytes, p.pool.v + at, p.pool.token_stride, rows);
    }
    simt::commit_copies();
  }

  // The warps' results of one row become one partial result. Everything of shared memory behind the rings is used.
  static SIMT_DEV void join(const DecodeParams& p, const Attention<Query, Stored, kDim>& mine, int slot, int group, float* shared) {
    float *outs = shared, *tops = outs + kWarps * group * kDim, *sums = tops + kWarps * group, *rounded = sums + kWarps * group;
    const int warp = simt::warp();
    mine.each_out([&](int row, int channel, float value) {
      if (row < group) outs[(warp * group + row) * kDim + channel] = value;
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = (simt::lane() >> 2) + 8 * r;
      if ((simt::lane() & 3) == 0 && row < group) {
        tops[warp * group + row] = mine.top[r], sums[warp * group + row] = mine.sum[r], rounded[warp * group + row] = mine.rounded[r];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * kDim; i += kThreads) {
      const int row = i / kDim;
      float best = -INFINITY, sum = 0.f, whole = 0.f, out = 0.f;
      for (int w = 0; w < kWarps; w++) best = fmaxf(best, tops[w * group + row]);
      const float base = best == -INFINITY ? 0.f : best;
      for (int w = 0; w < kWarps; w++) {
        const float share = simt::exp2_fast(tops[w * group + row] - base);
        sum += share * sums[w * group + row];
        whole += share * rounded[w * group + row];
        out += share * outs[w * group * kDim + i];
      }
      p.out[(int64_t)slot * group * kDim + i] = whole > 0.f ? out / whole : 0.f;
      if (i % kDim == 0) p.lse[(int64_t)slot * group + row] = sum > 0.f ? best + log2f(sum) : -INFINITY;
    }
    __syncthreads();  // before the next row's results go there
  }

  template <bool kTells> static SIMT_DEV void run(const DecodeParams& p) {
    SIMT_SHARED(raw);
    const int rows = p.batch.requests * p.batch.kv_heads, group = p.q_heads / p.batch.kv_heads, warp = simt::warp();
    const Run mine = Run::of(blockIdx.x, p.starts[rows], gridDim.x);
    if (mine.first >= mine.last) return;
    unsigned char* ring = raw + warp * p.ring * kSlot;
    float* shared = reinterpret_cast<float*>(raw + kWarps * p.ring * kSlot);

    Row row = Row::of(p, row_of(p.starts, rows, mine.first)), ahead = row;
    const auto load_ahead = [&](int tile, int to) {
      if (tile < mine.last) ahead.advance(p, tile);
      load(p, ahead, tile, tile < mine.last, ring + to * kSlot);
    };
    for (int i = 0; i < p.ring - 1; i++) load_ahead(mine.first + warp + i * kWarps, i);

    int slot = 0;
    for (int tile = mine.first + warp;;) {
      Queries<Stored, kDim> q;
      const auto* queries = static_cast<const typename Query::Value*>(p.q) + (int64_t)row.number * group * kDim;
      q.template load<Query>([&](int i) { return i < group ? queries + i * kDim : nullptr; });
      const float scale = p.scale_log2 * (p.k_scales ? p.k_scales[row.number % p.batch.kv_heads] : 1.f);
      Attention<Query, Stored, kDim> attention;
      attention.begin();
      const int length = p.batch.kv_lens[row.number / p.batch.kv_heads], end = min(row.end, mine.last), tiles_of_table = p.batch.table_stride * (p.pool.page_tokens / kTileTokens);
      for (; tile < end; tile += kWarps) {
        if (p.ring > 2) simt::await_copies<1>();
        else simt::await_copies<0>();
        __syncwarp();
        load_ahead(tile + (p.ring - 1) * kWarps, (slot ? slot : p.ring) - 1);
        const unsigned char* here = ring + slot * kSlot;
        const int first = row.first_token(p, tile);
        attention.template add<kTells>(
            q, here, here + KvTile::kBytes, scale,
            [&](int, int token) { return first + token < length && is_in_window(p.batch, first + token, length - 1); },
            [&](int i, float lse) {
              if (i < group) p.tile_lse[((int64_t)row.number * group + i) * tiles_of_table + first / kTileTokens] = lse;
            });
        slot = slot + 1 < p.ring ? slot + 1 : 0;
      }
      attention.finish();
      join(p, attention, blockIdx.x + row.number, group, shared);
      if (end >= mine.last) break;
      row.advance(p, end);
    }
    simt::await_copies<0>();
  }
};

// A block for each query head: its partial results are those of the runs that cross its row.
template <class Query> SIMT_DEV void decode_merge(const DecodeMergeParams& p) {
  const int row = blockIdx.x / p.group, head = blockIdx.x % p.group;
  const int begin = p.starts[row], end = p.starts[row + 1], each = Run::length(p.starts[p.rows], p.blocks);
  const int first = begin / each, last = end > begin ? (end - 1) / each : first - 1;
  const auto part = [&](int block) { return (int64_t)(block + row) * p.group + head; };
  float best = -INFINITY, sum = 0.f;
  for (int block = first; block <= last; block++) best = fmaxf(best, p.lse[part(block)]);
  const float base = best == -INFINITY ? 0.f : best;
  for (int block = first; block <= last; block++) sum += simt::exp2_fast(p.lse[part(block)] - base);
  const float scale = (p.v_scales ? p.v_scales[row % p.kv_heads] : 1.f) / (sum > 0.f ? sum : 1.f);
  for (int channel = threadIdx.x; channel < p.dim; channel += blockDim.x) {
    float out = 0.f;
    for (int block = first; block <= last; block++) out += simt::exp2_fast(p.lse[part(block)] - base) * p.out[part(block) * p.dim + channel];
    static_cast<typename Query::Value*>(p.to)[(int64_t)blockIdx.x * p.dim + channel] = Query::round(out * scale);
  }
  if (threadIdx.x == 0) p.lse_to[blockIdx.x] = sum > 0.f ? (best + log2f(sum)) * kLn2 : -INFINITY;
}

// A block for each query head: the weights of its tiles, summed over each page.
SIMT_DEV void page_mass(const MassParams& p) {
  const int request = blockIdx.x / p.q_heads, page_tiles = p.page_tokens / kTileTokens;
  const int head = blockIdx.x % p.q_heads / (p.q_heads / p.batch.kv_heads);
  const TileList tiles = tiles_of(p.batch, p.page_tokens, request, head, p.batch.kv_lens[request] - p.batch.window);
  const float whole = p.lse[blockIdx.x] / kLn2;
  float* mass = p.mass + (int64_t)blockIdx.x * p.batch.table_stride;
  for (int page = threadIdx.x; page < p.batch.table_stride; page += blockDim.x) mass[page] = 0.f;
  __syncthreads();
  const int length = p.batch.kv_lens[request];
  for (int i = threadIdx.x; i < tiles.count; i += blockDim.x) {  // the first tile of each page that is seen takes those that follow
    const int token = tiles.first_token(i), page = token / p.page_tokens;
    if (i > 0 && tiles.first_token(i - 1) / p.page_tokens == page) continue;
    float sum = 0.f;
    for (int j = i; j < tiles.count && j < i + page_tiles; j++) {
      const int at = tiles.first_token(j);
      if (at / p.page_tokens != page) break;
      sum += simt::exp2_fast(p.tile_lse[(int64_t)blockIdx.x * p.batch.table_stride * page_tiles + at / kTileTokens] - whole);
    }
    if (token < length) mass[page] = sum;
  }
}

template <class Query, class Stored, int kDim> struct Shape {
  static constexpr int kWarps = kDim > 128 ? 2 : 4;  // rings of two blocks fit a multiprocessor of an H100
  // Told, or ptxas spills to have one more; of 96 channels of 16 bits shared memory lets two be anyway.
  static constexpr int kResident = kDim == 64 ? 4 : kDim == 128 ? 0 : kDim == 96 && Stored::kBytes == 2 ? 2 : 3;
  using Kernel = Decode<Query, Stored, kDim, kWarps>;
};

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(decode_plan, PlanParams, kPlanThreads, plan)
SIMT_KERNEL(decode_merge_bf16, DecodeMergeParams, 128, decode_merge<Bf16>)
SIMT_KERNEL(decode_merge_f16, DecodeMergeParams, 128, decode_merge<F16>)
SIMT_KERNEL(decode_page_mass, MassParams, 128, page_mass)

#define DECODE(QUERY, Q, STORED, KV, DIM)                                                                             \
  SIMT_RESIDENT_KERNEL(decode_##Q##_##KV##_##DIM, DecodeParams, (Shape<QUERY, STORED, DIM>::Kernel::kThreads),        \
                       (Shape<QUERY, STORED, DIM>::kResident), (Shape<QUERY, STORED, DIM>::Kernel::run<false>))       \
  SIMT_RESIDENT_KERNEL(decode_##Q##_##KV##_##DIM##_mass, DecodeParams, (Shape<QUERY, STORED, DIM>::Kernel::kThreads), \
                       (Shape<QUERY, STORED, DIM>::kResident), (Shape<QUERY, STORED, DIM>::Kernel::run<true>))
#define DECODE_DIM(DIM) TIERD_TYPES(DECODE, DIM)

TIERD_DIMS(DECODE_DIM)
