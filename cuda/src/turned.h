// Attention of one token's query heads to a sequence of tiles of 16 tokens, with the products
// transposed. Tokens, then channels, are the rows of the tensor cores' products; query heads are
// their columns. Eight heads so take half the time and registers of sixteen rows.
//
// One warp does the work, as in attend.h: the same online softmax, weights in two parts. Lane l has
// the tokens l / 4 and l / 4 + 8 of scores and the channels of these numbers of outputs. Of both it
// has the heads 2 (l % 4) and the next.
#pragma once
#include "attend.h"

namespace tierd {

// Sums over tokens, of kBlocks blocks of 16 channels and kSets sets of eight heads.
template <int kBlocks, int kSets> struct TurnedSums {
  float out[kSets][kBlocks][4];
  float top[kSets][2];      // no less than any score so far, per head
  float sum[kSets][2];      // of this lane's weights; exact, for the log-sum-exp
  float rounded[kSets][2];  // of the same weights as they were multiplied, for the output: their rounding cancels

  SIMT_DEV void clear() {
#pragma unroll
    for (int s = 0; s < kSets; s++) {
#pragma unroll
      for (int b = 0; b < kBlocks; b++) out[s][b][0] = out[s][b][1] = out[s][b][2] = out[s][b][3] = 0.f;
#pragma unroll
      for (int h = 0; h < 2; h++) top[s][h] = -INFINITY, sum[s][h] = rounded[s][h] = 0.f;
    }
  }

  // Calls put(head, top, sum, rounded), once for each head of a warp.
  template <class Put> SIMT_DEV void each_head(Put put) const {
    if (simt::lane() >= 4) return;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int h = 0; h < 2; h++) put(8 * s + 2 * simt::lane() + h, top[s][h], sum[s][h], rounded[s][h]);
  }

  template <class Join> static SIMT_DEV float over_lanes(float x, Join join) {
    for (int by = 4; by < 32; by *= 2) x = join(x, __shfl_xor_sync(~0u, x, by));
    return x;
  }
  static SIMT_DEV float over_tokens(float x) {
    return over_lanes(x, [](float a, float b) { return a + b; });
  }

  // Raises the tops to these scores and shrinks earlier sums. After some tiles that is rarely
  // needed.
  SIMT_DEV void rise(int s, const float (&x)[2][2]) {
    float best[2];
#pragma unroll
    for (int h = 0; h < 2; h++) best[h] = fmaxf(x[0][h], x[1][h]);
    if (!simt::any(best[0] > top[s][0] || best[1] > top[s][1])) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float before = top[s][h];
      top[s][h] = fmaxf(before, over_lanes(best[h], [](float a, float b) { return fmaxf(a, b); }));
      const float shrink = before == -INFINITY ? 0.f : simt::exp2_fast(before - top[s][h]);
      sum[s][h] *= shrink, rounded[s][h] *= shrink;
#pragma unroll
      for (int b = 0; b < kBlocks; b++) out[s][b][h] *= shrink, out[s][b][h + 2] *= shrink;
    }
  }

  // Sums both heads over the tokens. Lanes of odd l / 4 take the second head's, so that one
  // exchange serves two.
  template <class OnLse> SIMT_DEV void report_lse(int s, const float (&alone)[2], OnLse on_lse) {
    const bool is_second = simt::lane() & 4;
    float whole = (is_second ? alone[1] : alone[0]) + __shfl_xor_sync(~0u, is_second ? alone[0] : alone[1], 4);
    for (int by = 8; by < 32; by *= 2) whole += __shfl_xor_sync(~0u, whole, by);
    const float base = is_second ? top[s][1] : top[s][0];
    if (simt::lane() < 8) on_lse(8 * s + 2 * (simt::lane() & 3) + is_second, lse_of(base, log2f(whole), whole));
  }
};

template <class Query, class Stored, int kDim, int kSets> struct TurnedAttention : TurnedSums<kDim / 16, kSets> {
  using Sums = TurnedSums<kDim / 16, kSets>;
  using Sums::out, Sums::top, Sums::sum, Sums::rounded;
  using Math = typename Stored::Math;
  using KvTile = Tile<Stored, kDim>;
  using Queries = Query;
  using Value = typename Query::Value;
  static constexpr int kChannels = kDim, kTileBytes = 2 * KvTile::kBytes;
  static constexpr int kBlocks = kDim / 16, kParts = std::is_same_v<Query, Math> ? 2 : 1;
  static constexpr bool kKeepsQueries = kSets * kDim <= 256;  // else no registers are free for them, and every tile loads them again

  const Value* queries;  // [heads][kDim]
  int heads;
  uint32_t q[kSets][kKeepsQueries ? kBlocks : 1][2];

  // rows: of the tile that are there.
  static SIMT_DEV void load_tile(
      unsigned char* slot, const unsigned char* k, const unsigned char* v, int64_t token_stride, int rows) {
    KvTile::load(slot, k, token_stride, rows);
    KvTile::load(slot + KvTile::kBytes, v, token_stride, rows);
  }

  SIMT_DEV void begin(const Value* of_queries, int of_heads) {
    queries = of_queries, heads = of_heads;
    Sums::clear();
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int b = 0; b < kBlocks; b++) load(q[s][b], s, b);
    }
  }

  // slot: as `load_tile` filled it. is_seen(token): for a token of the tile. on_lse(head, lse): gets
  // the tile's own log2-sum-exp, if kTells.
  template <bool kTells, class Seen, class OnLse>
  SIMT_DEV void add(const unsigned char* slot, float scale_log2, Seen is_seen, OnLse on_lse) {
    float scores[kSets][2][4] = {};  // of even and of odd blocks of channels: two chains of products, each half as long
    uint32_t spare[2];
#pragma unroll(kKeepsQueries ? kBlocks : 2)
    for (int b = 0; b < kBlocks; b++) {
      uint32_t halves[2][2];
      KvTile::keys(halves, slot, b, spare);
      const uint32_t rows[4] = {halves[0][0], halves[1][0], halves[0][1], halves[1][1]};
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        uint32_t(&columns)[2] = q[s][kKeepsQueries ? b : 0];
        if constexpr (!kKeepsQueries) load(columns, s, b);
        simt::multiply_add(scores[s][b & 1], rows, columns[0], columns[1], typename Math::Value());
      }
    }
    const int g = simt::lane() >> 2;
    const bool seen[2] = {is_seen(g), is_seen(g + 8)};
    uint32_t weights[kSets][kParts][2];
    float alone[kSets][2];  // this lane's weights of the tile
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      float x[2][2];  // of a token and a head
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) x[i][h] = seen[i] ? (scores[s][0][2 * i + h] + scores[s][1][2 * i + h]) * scale_log2 : -INFINITY;
      Sums::rise(s, x);
      weigh(s, x, weights[s], alone[s]);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      uint32_t pair[2][2];
      KvTile::values(pair, slot + KvTile::kBytes, b, spare);
      const uint32_t rows[4] = {pair[0][0], pair[1][0], pair[0][1], pair[1][1]};
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int part = 0; part < kParts; part++) simt::multiply_add(out[s][b], rows, weights[s][part][0], weights[s][part][1], typename Math::Value());
    }
    if constexpr (kTells) {  // while the tensor cores multiply
#pragma unroll
      for (int s = 0; s < kSets; s++) Sums::report_lse(s, alone[s], on_lse);
    }
  }

  // Sums over the lanes of a head; after the last tile.
  SIMT_DEV void finish() {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        sum[s][h] = Sums::over_tokens(sum[s][h]), rounded[s][h] = Sums::over_tokens(rounded[s][h]);
  }

  // Calls put(head, channel, value) for each value of this lane.
  template <class Put> SIMT_DEV void each_out(Put put) const {
    const int g = simt::lane() >> 2, t = simt::lane() & 3;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) put(8 * s + 2 * t + (e & 1), 16 * b + Stored::out(e >> 1, g), out[s][b][e]);
  }

 private:
  // A lane's words of a block of channels, for the head l / 4 of a set.
  SIMT_DEV void load(uint32_t (&words)[2], int set, int block) const {
    using Pair = Pack<Value, 2>;
    const int head = 8 * set + (simt::lane() >> 2), t = simt::lane() & 3;
    const auto word = [&](int channel) {
      const Pair pair = *reinterpret_cast<const Pair*>(queries + head * kDim + 16 * block + channel);
      return pack_query<Math>(Query::widen(pair.values[0]), Query::widen(pair.values[1]));
    };
    words[0] = head < heads ? word(Stored::first(t)) : 0, words[1] = head < heads ? word(Stored::second(t)) : 0;
  }

  // Turns scores into weights in the tensor cores' layout: of a head its tokens.
  SIMT_DEV void weigh(int s, float (&x)[2][2], uint32_t (&weights)[kParts][2], float (&alone)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float base = top[s][h] == -INFINITY ? 0.f : top[s][h];
      x[0][h] = simt::exp2_fast(x[0][h] - base), x[1][h] = simt::exp2_fast(x[1][h] - base);
      alone[h] = x[0][h] + x[1][h];
      sum[s][h] += alone[h];
    }
#pragma unroll
    for (int part = 0; part < kParts; part++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t pair = Math::pack(x[i][0], x[i][1]);
        const float low = Math::low_of(pair), high = Math::high_of(pair);
        rounded[s][0] += low, rounded[s][1] += high;
        x[i][0] -= low, x[i][1] -= high;  // for the next part
        weights[part][i] = simt::transposed(pair);
      }
  }
};

}  // namespace tierd
