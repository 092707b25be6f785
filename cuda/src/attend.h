// Attention of a warp's query rows to one step of 32 tokens after another. Online softmax (Milakov
// and Gimelshein, arXiv 1805.02867) on tensor cores.
//
// Rows are in sets of 16, which share each fragment of K and V. Of a set lane l has the rows l / 4
// and l / 4 + 8 of scores and outputs. Scores are in units of log2, so that exp2 suffices.
#pragma once
#include <float.h>
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

constexpr int kStepTiles = 2;
// A row's base begins kBelow under its first scores. It rises only if a score is more than kRange
// above it, so sums rarely shrink. Weights are at most 2^kRange, within fp16. Small ones keep more
// bits in fp16 than with the greatest score as base.
constexpr float kBelow = 7.f, kRange = 15.f;

// Weights have two parts, the rounded weight and its rounding error, if one part would be as coarse
// as the output. With flat attention one part would err as much as the output's own rounding.
template <class Query, class Stored, int kDim, int kSets> struct Attention {
  using Math = typename Stored::Math;
  using KvTile = Tile<Stored, kDim>;
  using QueryTile = Tile<Stored16<Math>, kDim>;  // of a set, with channels in the order of a operands
  static constexpr int kBlocks = kDim / 16, kParts = std::is_same_v<Query, Math> ? 2 : 1;

  float out[kSets][2 * kBlocks][4];
  float base[kSets][2];  // of exponents, per row
  float sum[kSets][2];   // of this lane's weights
  float scores[kSets][2 * kStepTiles][4];  // of the current step

  // row: returns the first channel of a query row, or null if there is none.
  template <class Row> static SIMT_DEV void load_queries(unsigned char* to, Row row) {
    using Pair = Pack<typename Query::Value, 2>;
    for (int i = simt::lane(); i < kSets * 16 * kDim / 2; i += 32) {
      const int at = i / (kDim / 2), word = i % (kDim / 2), chunk = word / 4, t = word % 4;
      const typename Query::Value* q = row(at);
      const int channel = chunk / 2 * 16 + (chunk % 2 ? Stored::second(t) : Stored::first(t));
      const Pair pair = q ? *reinterpret_cast<const Pair*>(q + channel) : Pair{};
      const uint32_t packed = pack_query<Math>(Query::widen(pair.values[0]), Query::widen(pair.values[1]));
      memcpy(to + at / 16 * QueryTile::kBytes + QueryTile::at(at % 16, chunk) + 4 * t, &packed, 4);
    }
    __syncwarp();
  }

  SIMT_DEV void begin() {
#pragma unroll
    for (int s = 0; s < kSets; s++) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; i++) out[s][i][0] = out[s][i][1] = out[s][i][2] = out[s][i][3] = 0.f;
#pragma unroll
      for (int r = 0; r < 2; r++) base[s][r] = -FLT_MAX, sum[s][r] = 0.f;
    }
  }

  // q: as `load_queries` left it. k: the tiles of a step.
  SIMT_DEV void multiply_keys(const unsigned char* q, const unsigned char* k, float scale_log2) {
    int lane = simt::lane();
    simt::forget(lane);
    uint32_t spare[kStepTiles][2];
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int i = 0; i < 2 * kStepTiles; i++) scores[s][i][0] = scores[s][i][1] = scores[s][i][2] = scores[s][i][3] = 0.f;
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      uint32_t rows[kSets][4];
#pragma unroll
      for (int s = 0; s < kSets; s++) simt::load_matrices(rows[s], q + s * QueryTile::kBytes + QueryTile::at(lane & 15, 2 * b + (lane >> 4)));
#pragma unroll
      for (int tile = 0; tile < kStepTiles; tile++) {
        uint32_t halves[2][2];
        KvTile::keys(halves, k + tile * KvTile::kBytes, b, spare[tile], lane);
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            simt::multiply_add(scores[s][2 * tile + half], rows[s], halves[half][0], halves[half][1], typename Math::Value());
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int i = 0; i < 8 * kStepTiles; i++) scores[s][i / 4][i % 4] *= scale_log2;
  }

  // Scores of tokens that a row does not see become -inf. first_of(tile): a tile's first token.
  // sees(set, r, token): whether the lane's row r of a set sees a token.
  template <class First, class Sees> SIMT_DEV void mask(First first_of, Sees sees) {
    int t = simt::lane() & 3;
    simt::forget(t);  // a branch, since it is rarely taken
#pragma unroll
    for (int tile = 0; tile < kStepTiles; tile++) {
      const int first = first_of(tile);
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float& x = scores[s][2 * tile + (i >> 2)][i & 3];
          x = sees(s, i >> 1 & 1, first + 8 * (i >> 2) + 2 * t + (i & 1)) ? x : -INFINITY;
        }
    }
  }

  // Adds the step's values. v: its tiles.
  SIMT_DEV void multiply_values(const unsigned char* v) {
    rise();
    uint32_t spare[2];
#pragma unroll
    for (int tile = 0; tile < kStepTiles; tile++) {
      uint32_t weights[kSets][kParts][4];
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int i = 0; i < 4; i++) weigh(s, i & 1, scores[s][2 * tile + (i >> 1)], weights[s], i);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        uint32_t pair[2][2];
        KvTile::values(pair, v + tile * KvTile::kBytes, b, spare);
#pragma unroll
        for (int part = 0; part < kParts; part++)
#pragma unroll
          for (int s = 0; s < kSets; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) simt::multiply_add(out[s][2 * b + i], weights[s][part], pair[i][0], pair[i][1], typename Math::Value());
      }
    }
  }

  // Sums over the lanes of a row; after the last step.
  SIMT_DEV void finish() {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) sum[s][r] = over_row(sum[s][r]);
  }

  // Calls put(set, r, channel, value) for each value of this lane, of its row r.
  template <class Put> SIMT_DEV void each_out(Put put) const {
    const int t = simt::lane() & 3;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) put(s, e >> 1, 16 * (i / 2) + Stored::out(i & 1, 2 * t + (e & 1)), out[s][i][e]);
  }

 private:
  static SIMT_DEV float over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  // Raises the bases to the step's scores and shrinks earlier sums, if a score needs it.
  SIMT_DEV void rise() {
    float best[kSets][2];
    bool rises = false;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        best[s][r] = -INFINITY;
#pragma unroll
        for (int i = 0; i < 2 * kStepTiles; i++) best[s][r] = fmaxf(best[s][r], fmaxf(scores[s][i][2 * r], scores[s][i][2 * r + 1]));
        rises |= best[s][r] > base[s][r] + kRange;
      }
    if (!simt::any(rises)) return;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float next = fmaxf(best[s][r], __shfl_xor_sync(~0u, best[s][r], 1));
        next = fmaxf(base[s][r], fmaxf(next, __shfl_xor_sync(~0u, next, 2)) - kBelow);
        const float shrink = simt::exp2_fast(base[s][r] - next);
        base[s][r] = next, sum[s][r] *= shrink;
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; i++) out[s][i][2 * r] *= shrink, out[s][i][2 * r + 1] *= shrink;
      }
  }

  // Turns two scores of row r into words of weights.
  SIMT_DEV void weigh(int s, int r, const float (&of)[4], uint32_t (&weights)[kParts][4], int word) {
    const float low = simt::exp2_fast(of[2 * r] - base[s][r]), high = simt::exp2_fast(of[2 * r + 1] - base[s][r]);
    sum[s][r] += low + high;
    weights[0][word] = Math::pack(low, high);
    if constexpr (kParts == 2) weights[1][word] = Math::pack(low - Math::low_of(weights[0][word]), high - Math::high_of(weights[0][word]));
  }
};

}  // namespace tierd
