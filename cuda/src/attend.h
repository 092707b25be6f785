// Attention of up to 16 query rows to one tile of 16 tokens after another. Online softmax (Milakov
// and Gimelshein, arXiv 1805.02867) on tensor cores.
//
// One warp does the work. Lane l has the rows l / 4 and l / 4 + 8 of its accumulators. Scores are
// in units of log2, so that exp2 suffices.
#pragma once
#include <math.h>

#include <type_traits>

#include "tile.h"

#ifndef TIERD_DIMS  // head dims of the built kernels; fewer for a quick build
#define TIERD_DIMS(EACH) EACH(64) EACH(96) EACH(128) EACH(256)
#endif

// EACH(queries, their name, keys and values as stored, their name, head dim): the kernels of a head
// dim.
#define TIERD_TYPES(EACH, DIM)                \
  EACH(Bf16, bf16, Stored16<Bf16>, bf16, DIM) \
  EACH(F16, f16, Stored16<F16>, f16, DIM)     \
  EACH(Bf16, bf16, StoredE4m3, e4m3, DIM)     \
  EACH(F16, f16, StoredE4m3, e4m3, DIM)

namespace tierd {

template <class Stored, int kDim> struct Queries {
  static constexpr int kBlocks = kDim / 16;
  uint32_t words[kBlocks][4];

  // row: returns the first channel of a query row, or null if there is none.
  template <class Query, class Row> SIMT_DEV void load(Row row) {
    using Math = typename Stored::Math;
    const int t = simt::lane() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const typename Query::Value* q = row((simt::lane() >> 2) + 8 * r);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const int first = 16 * b + Stored::first(t), second = 16 * b + Stored::second(t);
        words[b][r] = q ? pack_query<Math>(Query::widen(q[first]), Query::widen(q[first + 1])) : 0;
        words[b][r + 2] = q ? pack_query<Math>(Query::widen(q[second]), Query::widen(q[second + 1])) : 0;
      }
    }
  }
};

// Weights have two parts, the rounded weight and its rounding error, if one part would be as coarse
// as the output. With flat attention one part would err as much as the output's own rounding.
template <class Query, class Stored, int kDim> struct Attention {
  using Math = typename Stored::Math;
  using KvTile = Tile<Stored, kDim>;
  static constexpr int kBlocks = kDim / 16, kParts = std::is_same_v<Query, Math> ? 2 : 1;

  float out[2 * kBlocks][4];
  float top[2];      // the greatest score so far, per row
  float sum[2];      // of this lane's weights; exact, for the log-sum-exp
  float rounded[2];  // of the same weights as they were multiplied, for the output: their rounding cancels

  SIMT_DEV void begin() {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = -INFINITY, sum[r] = rounded[r] = 0.f;
  }

  // is_seen(row, token): whether a query row sees a token of the tile.
  template <class Seen> SIMT_DEV void add(const Queries<Stored, kDim>& q, const unsigned char* k, const unsigned char* v, float scale_log2, Seen is_seen) {
    float scores[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    uint32_t spare[2];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      uint32_t halves[2][2];
      KvTile::keys(halves, k, b, spare);
      simt::multiply_add(scores[0], q.words[b], halves[0][0], halves[0][1], typename Math::Value());
      simt::multiply_add(scores[1], q.words[b], halves[1][0], halves[1][1], typename Math::Value());
    }
    uint32_t weights[kParts][4];
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) shrink[r] = weigh(scores, r, weights, scale_log2, is_seen);
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++) out[i][0] *= shrink[0], out[i][1] *= shrink[0], out[i][2] *= shrink[1], out[i][3] *= shrink[1];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      uint32_t pair[2][2];
      KvTile::values(pair, v, b, spare);
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        simt::multiply_add(out[2 * b], weights[part], pair[0][0], pair[0][1], typename Math::Value());
        simt::multiply_add(out[2 * b + 1], weights[part], pair[1][0], pair[1][1], typename Math::Value());
      }
    }
  }

  // Sums over the lanes of a row; after the last tile.
  SIMT_DEV void finish() {
#pragma unroll
    for (int r = 0; r < 2; r++) sum[r] = over_row(sum[r]), rounded[r] = over_row(rounded[r]);
  }

  // Calls put(row, channel, value) for each value of this lane.
  template <class Put> SIMT_DEV void each_out(Put put) const {
    const int t = simt::lane() & 3;
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) put((simt::lane() >> 2) + 8 * (e >> 1), 16 * (i / 2) + Stored::out(i & 1, 2 * t + (e & 1)), out[i][e]);
  }

 private:
  static SIMT_DEV float over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  // Turns the scores of row r into weights. Returns the factor by which earlier sums shrink.
  template <class Seen> SIMT_DEV float weigh(float (&scores)[2][4], int r, uint32_t (&weights)[kParts][4], float scale_log2, Seen is_seen) {
    const int row = (simt::lane() >> 2) + 8 * r, t = simt::lane() & 3;
    float x[4], best = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      x[j] = is_seen(row, (j >> 1) * 8 + 2 * t + (j & 1)) ? scores[j >> 1][2 * r + (j & 1)] * scale_log2 : -INFINITY;
      best = fmaxf(best, x[j]);
    }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    best = fmaxf(best, top[r]);
    const float base = best == -INFINITY ? 0.f : best, shrink = simt::exp2_fast(top[r] - base);
    top[r] = best;
    float mine = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = simt::exp2_fast(x[j] - base), mine += x[j];
    sum[r] = sum[r] * shrink + mine;
    rounded[r] *= shrink;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t pair = weights[part][r + 2 * i] = Math::pack(x[2 * i], x[2 * i + 1]);
        const float low = Math::low_of(pair), high = Math::high_of(pair);
        rounded[r] += low + high;
        x[2 * i] -= low, x[2 * i + 1] -= high;  // for the next part
      }
    }
    return shrink;
  }
};

}  // namespace tierd
