// Paged decode: one query token of each request attends to the pages of its block table, anywhere
// in the pool.
//
// The grid's blocks share the tiles of all requests and kv heads in equal runs (`share.h`). A run
// may cross rows, and a row may cross runs. If blocks share a row, each has a part of it. The block
// that brings the last part of some neighbours joins them by their log-sum-exps, in their order.
// Joins go on upwards (FlashDecoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005, section 3.3).
// The last to arrive joins, as in Stream-K (arXiv 2301.03598).
// Within a block each warp takes every fourth tile. It has its own ring of tiles in shared memory,
// filled ahead across rows: the loop has no barrier but the warp's own. The caller's shared memory
// sets the ring's length. One tile is in use while one or two are in flight, and the page id of the
// next one is being read.
#pragma once
#include "share.h"
#include "turned.h"

namespace tierd {

struct DecodeParams {
  Batch batch;
  Pool pool;
  const void* q;          // [requests][q_heads][dim]
  void* to;               // as q
  float* lse_to;          // [requests][q_heads], natural
  float *out, *lse;       // parts: [blocks + rows][group][dim], [2][blocks + rows][group] (log2)
  uint64_t* launches;     // number of launches, as simt.h counts them
  uint64_t* arrived;      // [blocks + rows]: number of parts present for the next join, above the
                          // launch's number; starts with any value
  float* tile_lse;        // null, or [requests][kv_heads][table_stride * page_tokens / 16][group]
                          // (log2), written for the tiles of the list
  float* mass;            // with it: [requests][q_heads][table_stride], zeroed; null: kept
  const float *k_scales, *v_scales;  // null, or [kv_heads]: factors of stored keys and values
  int q_heads;
  int ring;  // 2 or 3: a warp's tiles of K and V in shared memory
  float scale_log2;
};

constexpr int kFan = 8;       // partial results that are loaded and joined at a time
constexpr int kOnce = 16;     // most partial results joined at once: to wait for others costs as
                              // much as to read eight more
constexpr int kLongRun = 64;  // tiles: in a longer run a ring of two is quicker, as it keeps the
                              // memory's queues shorter

// RowAttention: of one row, such as TurnedAttention: how tiles are loaded and added.
template <class RowAttention, int kWarps> struct Decode {
  using Attention = RowAttention;
  using Query = typename Attention::Queries;
  using Value = typename Query::Value;
  using Four = Pack<float, 4>;
  static constexpr int kDim = Attention::kChannels, kSlot = Attention::kTileBytes, kThreads = 32 * kWarps;
  static constexpr int kPadded = kDim + 4;  // heads use different banks
  static constexpr bool kAsksAhead = kDim <= 128;  // with more channels no register is free for it

  // A row's part: its place among partial results, its number of joins, and whether it is the row's
  // result.
  struct Part {
    int row, slot, level;
    bool is_all;
  };

  // The tile that a warp loads next, and its page, which is read one turn ahead.
  struct Next {
    Row row;
    int tile, page;

    SIMT_DEV int token(const DecodeParams& p) const { return row.first_token(p.batch, p.pool.page_tokens, tile); }
    SIMT_DEV int request(const DecodeParams& p) const { return row.number / p.batch.kv_heads; }
    // Number of tokens from the tile's first on.
    SIMT_DEV int rows(const DecodeParams& p) const { return p.batch.kv_lens[request(p)] - token(p); }

    SIMT_DEV int page_of_tile(const DecodeParams& p) const {
      return rows(p) > 0 ? page_of(p.batch, p.pool, request(p), token(p)) : 0;
    }

    SIMT_DEV void find(const DecodeParams& p, int last) {
      if (tile >= last) return;
      row.advance(p.batch, p.pool.page_tokens, tile);
      if constexpr (kAsksAhead) page = page_of_tile(p);
    }
    SIMT_DEV void load(const DecodeParams& p, int last, unsigned char* slot) {
      if (tile < last) {
        if constexpr (!kAsksAhead) page = page_of_tile(p);
        const int64_t at = page * p.pool.page_stride + row.number % p.batch.kv_heads * p.pool.head_stride +
            token(p) % p.pool.page_tokens * p.pool.token_stride;
        Attention::load_tile(slot, p.pool.k + at, p.pool.v + at, p.pool.token_stride, rows(p));
      }
      simt::commit_copies();
      tile += kWarps;
      find(p, last);
    }
  };

  // Stores four channels from the i-th on, counted over all heads.
  static SIMT_DEV void put(const DecodeParams& p, int64_t i, const float (&x)[4], float scale) {
    const Pack<Value, 4> rounded = {
        Query::round(x[0] * scale), Query::round(x[1] * scale), Query::round(x[2] * scale), Query::round(x[3] * scale)};
    *reinterpret_cast<Pack<Value, 4>*>(static_cast<Value*>(p.to) + i) = rounded;
  }
  static SIMT_DEV void put_lse(const DecodeParams& p, int64_t head, float top, float sum) {
    p.lse_to[head] = lse_of(top, log2f(sum), sum) * kLn2;
  }
  static SIMT_DEV float v_scale(const DecodeParams& p, int row) {
    return p.v_scales ? p.v_scales[row % p.batch.kv_heads] : 1.f;
  }

  // Rows without a tile are in no block's run: a lane checks one row, all lanes fill it.
  static SIMT_DEV void put_empty(const DecodeParams& p, int group) {
    const int rows = p.batch.requests * p.batch.kv_heads;
    for (int first = 32 * (blockIdx.x * kWarps + simt::warp()); first < rows; first += gridDim.x * kThreads) {
      const int row = first + simt::lane();
      const bool is_empty = row < rows && Row::of(p.batch, p.pool.page_tokens, row, 0).end == 0;
      if (!simt::any(is_empty)) continue;
      for (int lane = 0; lane < 32; lane++) {
        if (!__shfl_sync(~0u, int(is_empty), lane)) continue;
        const int64_t head = (int64_t)(first + lane) * group;
        for (int i = 4 * simt::lane(); i < group * kDim; i += 128) put(p, head * kDim + i, {0.f, 0.f, 0.f, 0.f}, 0.f);
        if (simt::lane() < group) put_lse(p, head + simt::lane(), 0.f, 0.f);
      }
    }
  }

  // Log-sum-exps of parts (log2). Joins read those of one level and write those of the next, in two
  // sets by turns.
  static SIMT_DEV float* lses_of(const DecodeParams& p, int level, int group) {
    return p.lse + (level & 1) * (int64_t)(gridDim.x + p.batch.requests * p.batch.kv_heads) * group;
  }

  // Stores four of a part's channels, from the i-th of its heads on: out / weight. With a head's
  // first channels it stores the log-sum-exp.
  static SIMT_DEV void put_part(const DecodeParams& p, const Part& part, int group, int i, const float (&out)[4],
      float weight, float base, float sum) {
    const int64_t first_head = (int64_t)(part.is_all ? part.row : part.slot) * group, head = first_head + i / kDim;
    const float scale = inverse_of(weight, part.is_all ? v_scale(p, part.row) : 1.f);
    if (part.is_all) put(p, first_head * kDim + i, out, scale);
    else *reinterpret_cast<Four*>(p.out + first_head * kDim + i) = {
        out[0] * scale, out[1] * scale, out[2] * scale, out[3] * scale};
    if (i % kDim) return;
    if (part.is_all) put_lse(p, head, base, sum);
    else lses_of(p, part.level, group)[head] = lse_of(base, log2f(sum), sum);
  }

  // Joins the warps' results of a row. shared: the memory behind the rings, except `is_last`.
  static SIMT_DEV void join_warps(
      const DecodeParams& p, const Attention& attention, const Part& part, int group, float* shared) {
    float *outs = shared, *tops = outs + kWarps * group * kPadded, *sums = tops + kWarps * group,
          *rounded = sums + kWarps * group;
    const int first = simt::warp() * group;
    attention.each_out([&](int head, int channel, float value) {
      if (head < group) outs[(first + head) * kPadded + channel] = value;
    });
    attention.each_head([&](int head, float top, float sum, float as_multiplied) {
      if (head < group) tops[first + head] = top, sums[first + head] = sum, rounded[first + head] = as_multiplied;
    });
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < group * kDim; i += 4 * kThreads) {
      const int head = i / kDim, channel = i % kDim;
      float base = -INFINITY, sum = 0.f, whole = 0.f, out[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; w++) base = fmaxf(base, tops[w * group + head]);
      base = base == -INFINITY ? 0.f : base;
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        const float share = simt::exp2_fast(tops[w * group + head] - base);
        const Four four = *reinterpret_cast<const Four*>(outs + (w * group + head) * kPadded + channel);
        sum += share * sums[w * group + head];
        whole += share * rounded[w * group + head];
#pragma unroll
        for (int j = 0; j < 4; j++) out[j] += share * four.values[j];
      }
      put_part(p, part, group, i, out, whole, base, sum);
    }
    __syncthreads();  // before the next row's results replace these, and before the part is announced
  }

  // Joins parts of the level below; they are `step` slots apart, from its own slot on.
  static SIMT_DEV void join_parts(const DecodeParams& p, const Part& part, int parts, int step, int group) {
    const float* of_parts = lses_of(p, part.level - 1, group);
    for (int i = 4 * threadIdx.x; i < group * kDim; i += 4 * kThreads) {
      float top = -INFINITY, sum = 0.f, out[4] = {0.f, 0.f, 0.f, 0.f};
      for (int from = 0; from < parts; from += kFan) {
        float outs[kFan][4], lses[kFan], before = top;
#pragma unroll
        for (int j = 0; j < kFan; j++) {
          const int64_t first_head = (int64_t)(part.slot + min(from + j, parts - 1) * step) * group;
          lses[j] = simt::load_of_others(of_parts + first_head + i / kDim);
          simt::load_of_others(outs[j], p.out + first_head * kDim + i);
        }
#pragma unroll
        for (int j = 0; j < kFan; j++) top = fmaxf(top, lses[j]);
        const float base = top == -INFINITY ? 0.f : top, shrink = simt::exp2_fast(before - base);
        sum *= shrink, out[0] *= shrink, out[1] *= shrink, out[2] *= shrink, out[3] *= shrink;
#pragma unroll
        for (int j = 0; j < kFan; j++) {
          const float share = from + j < parts ? simt::exp2_fast(lses[j] - base) : 0.f;
          sum += share;
#pragma unroll
          for (int k = 0; k < 4; k++) out[k] += share * outs[j][k];
        }
      }
      put_part(p, part, group, i, out, sum, top == -INFINITY ? 0.f : top, sum);
    }
    __syncthreads();  // before the part is announced
  }

  // The block's part of a row is stored. The block that brings the last of some neighbours joins
  // them. It brings the joined part in turn, until it is the whole row. launch: the launch's
  // number, known to the first thread.
  static SIMT_DEV void publish_partial(
      const DecodeParams& p, const Run& run, const Row& row, int group, int* is_last, uint64_t launch) {
    const int from = row.begin / run.length, parts = (row.end - 1) / run.length - from + 1, slots = from + row.number;
    const int fan = parts > kOnce ? kFan : kOnce;
    int part = blockIdx.x - from;
    for (int level = 1, step = 1; step < parts; level++, step *= fan) {
      part -= part % (fan * step);
      const int count = min(fan, (parts - part + step - 1) / step);
      if (count > 1) {  // its counter is the first slot's; a level up it is the next one's, which no other join uses
        if (threadIdx.x == 0) *is_last = simt::is_last_of(p.arrived + slots + part + level - 1, launch, count);
        __syncthreads();
        if (!*is_last) return;
      }
      join_parts(p, {row.number, slots + part, level, fan * step >= parts}, count, step, group);
    }
  }

  template <bool kTells> static SIMT_DEV void run(const DecodeParams& p) {
    SIMT_SHARED(raw);
    const int group = p.q_heads / p.batch.kv_heads, warp = simt::warp(), page_tokens = p.pool.page_tokens;
    unsigned char* ring = raw + warp * p.ring * kSlot;
    float* shared = reinterpret_cast<float*>(raw + kWarps * p.ring * kSlot);
    int* is_last = reinterpret_cast<int*>(shared + kWarps * group * (kPadded + 3));
    uint64_t launch = threadIdx.x == 0 ? simt::launch_of(p.launches) : 0;
    const Share share = Share::of<kThreads>(p.batch, page_tokens, is_last);
    const int last = share.run.last, tiles_there = share.run.length > kLongRun ? 2 : p.ring;
    Row row = share.row;
    Next next{row, share.run.first + warp};
    next.find(p, last);
    for (int i = 0; i < tiles_there - 1; i++) next.load(p, last, ring + i * kSlot);
    put_empty(p, group);
    // Behind the share's numbers: a register for so long costs too much.
    uint64_t* kept = reinterpret_cast<uint64_t*>(is_last + kWarps + 2);
    if (threadIdx.x == 0) *kept = launch;
    if constexpr (kTells) {
      const int64_t count = (int64_t)p.batch.requests * p.q_heads * p.batch.table_stride;
      for (int64_t i = blockIdx.x * kThreads + threadIdx.x; p.mass && i < count; i += gridDim.x * kThreads) p.mass[i] = 0.f;
    }

    int slot = 0;
    for (int tile = share.run.first + warp; share.run.first < last;) {
      Attention attention;
      attention.begin(static_cast<const Value*>(p.q) + (int64_t)row.number * group * kDim, group);
      const float scale = p.scale_log2 * (p.k_scales ? p.k_scales[row.number % p.batch.kv_heads] : 1.f);
      const int length = p.batch.kv_lens[row.number / p.batch.kv_heads], end = min(row.end, last),
                tiles_of_table = p.batch.table_stride * (page_tokens / kTileTokens);
      for (; tile < end; tile += kWarps) {
        if (tiles_there > 2) simt::await_copies<1>();
        else simt::await_copies<0>();
        __syncwarp();
        next.load(p, last, ring + ((slot ? slot : tiles_there) - 1) * kSlot);
        const unsigned char* here = ring + slot * kSlot;
        const int first = row.first_token(p.batch, page_tokens, tile);
        attention.template add<kTells>(
            here, scale,
            [&](int token) { return first + token < length && is_in_window(p.batch, first + token, length - 1); },
            [&](int i, float lse) {
              if (i < group) p.tile_lse[((int64_t)row.number * tiles_of_table + first / kTileTokens) * group + i] = lse;
            });
        slot = slot + 1 < tiles_there ? slot + 1 : 0;
      }
      attention.finish();
      join_warps(p, attention,
          {row.number, int(blockIdx.x) + row.number, 0, share.run.first <= row.begin && row.end <= last}, group,
          shared);
      if (end >= last) break;
      row.advance(p.batch, page_tokens, end);
    }
    simt::await_copies<0>();
    if (share.run.first >= last) return;
    // At the end of the run, since an announcement waits for the memory. Only its first and last
    // rows can be shared.
    const Row& first = share.row;
    launch = threadIdx.x == 0 ? *kept : 0;
    if (first.begin < share.run.first || first.end > last) publish_partial(p, share.run, first, group, is_last, launch);
    if (row.number != first.number && row.end > last) publish_partial(p, share.run, row, group, is_last + 1, launch);
  }
};

struct ClearParams {
  uint32_t* words;
  int count;
};

SIMT_DEV void clear(const ClearParams& p) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) p.words[i] = 0;
}

}  // namespace tierd

SIMT_KERNEL(decode_clear, tierd::ClearParams, 128, tierd::clear)  // each unit has it
