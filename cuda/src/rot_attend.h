// Attention of one token's query heads to rotated codes as they lie, with transposed products as in
// turned.h. Queries are rotated once, and each warp's sums are rotated back at their end.
//
// A key is H (code + 1/2 - 2^(b-1)) times its scale; H is its own inverse. So its score is the
// product of the rotated query with the code. The operand of a code is 2^b + 1/2 + code, exact in
// fp16, by a shift and a logic operation for a pair. The surplus, 3 * 2^(b-1), is subtracted from
// sums. A value's scale is a factor of its weight.
#pragma once
#include "rot.h"
#include "turned.h"

namespace tierd {

constexpr float kWeightRange = 32768.f;  // of the largest weight times scale; fp16 is normal for 2^29 below it

template <int kBits> struct Codes {
  static constexpr int kWords = kBits / 4;                 // of a lane and a block
  static constexpr float kSurplus = 1.5f * (1 << kBits);  // of an operand above its value

  // Four operands of fp16 pairs, from a lane's words of a block.
  static SIMT_DEV void operands(uint32_t (&rows)[4], const uint32_t* words) {
    if constexpr (kBits == 4) {
      constexpr uint32_t kMask = 0x03C003C0, kBase = 0x4C204C20;
      rows[0] = simt::and_or(words[0] << 6, kMask, kBase), rows[1] = simt::and_or(words[0] << 2, kMask, kBase);
      rows[2] = simt::and_or(words[0] >> 2, kMask, kBase), rows[3] = simt::and_or(words[0] >> 6, kMask, kBase);
    } else {
      constexpr uint32_t kMask = 0x03FC03FC, kBase = 0x5C025C02;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        rows[2 * i] = simt::and_or(words[i] << 2, kMask, kBase);
        rows[2 * i + 1] = simt::and_or(words[i] >> 6, kMask, kBase);
      }
    }
  }

  // A lane's words of four adjoining blocks. group: their number.
  static SIMT_DEV void load(uint32_t (&words)[kAdjoining * kWords], const unsigned char* codes, int group) {
    using Four = Pack<uint32_t, 4>;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const Four four = reinterpret_cast<const Four*>(codes)[(group * kWords + i) * 32 + simt::lane()];
#pragma unroll
      for (int k = 0; k < 4; k++) words[4 * i + k] = four.values[k];
    }
  }
};

template <class Query, int kKeyBits, int kValueBits, int kDim, int kSets> struct RotatedAttention
    : TurnedSums<kDim / 16, kSets> {
  using Sums = TurnedSums<kDim / 16, kSets>;
  using Sums::out, Sums::top, Sums::sum, Sums::rounded;
  using Queries = Query;
  using Value = typename Query::Value;
  using Keys = Codes<kKeyBits>;
  using Values = Codes<kValueBits>;
  using Turn = Rotation<kDim>;
  static constexpr int kChannels = kDim, kBlocks = kDim / 16, kKeyBytes = kKeyBits * Turn::kCodeBytes,
                       kValueBytes = kValueBits * Turn::kCodeBytes;
  static constexpr int kTileBytes = kKeyBytes + kValueBytes + 2 * Turn::kScaleBytes;

  uint32_t q[kSets][kBlocks][2];  // rotated queries, each divided by a power of two
  float factor[kSets][2];         // that power, per head
  float surplus[kSets][2];        // of a score, per head
  float reach;                    // the greatest value scale so far, as a power of two not below it

  // A tile is contiguous. Pieces of 16 bytes are put so that the lanes of `Codes::load` read
  // neighbouring ones.
  static SIMT_DEV void load_tile(
      unsigned char* slot, const unsigned char* tile, const unsigned char*, int64_t, int rows) {
    load_codes<Keys>(slot, tile, rows);
    load_codes<Values>(slot + kKeyBytes, tile + kKeyBytes, rows);
    const int at = kKeyBytes + kValueBytes + 16 * simt::lane();
    if (at < kTileBytes) simt::copy_async(slot + at, tile + at, rows > 0);
  }

  SIMT_DEV void begin(const Value* queries, int heads) {
    Sums::clear();
    reach = 0x1p-24f;  // the least scale of fp16
#pragma unroll
    for (int s = 0; s < kSets; s++)
      rotate(s, queries + (8 * s + (simt::lane() >> 2)) * kDim, 8 * s + (simt::lane() >> 2) < heads);
  }

  // As TurnedAttention's.
  template <bool kTells, class Seen, class OnLse> SIMT_DEV void add(
      const unsigned char* slot, float scale_log2, Seen is_seen, OnLse on_lse) {
    static_assert(!kTells);
    float scores[kSets][2][4] = {};
#pragma unroll
    for (int group = 0; group < kBlocks / kAdjoining; group++) {
      uint32_t words[kAdjoining * Keys::kWords];
      Keys::load(words, slot, group);
#pragma unroll
      for (int i = 0; i < kAdjoining; i++) {
        uint32_t rows[4];
        Keys::operands(rows, words + i * Keys::kWords);
#pragma unroll
        for (int s = 0; s < kSets; s++) {
          const uint32_t(&columns)[2] = q[s][group * kAdjoining + i];
          simt::multiply_add(scores[s][i & 1], rows, columns[0], columns[1], __half());
        }
      }
    }
    const auto* scales = reinterpret_cast<const __half*>(slot + kKeyBytes + kValueBytes);
    const int g = simt::lane() >> 2;
    const bool seen[2] = {is_seen(g), is_seen(g + 8)};
    float of_key[2], of_value[2];  // scales, of two tokens; infinite ones become NaN
#pragma unroll
    for (int i = 0; i < 2; i++) {
      of_key[i] = finite(scales[g + 8 * i]) * scale_log2;
      of_value[i] = seen[i] ? finite(scales[kTileTokens + g + 8 * i]) : 0.f;
    }
    widen_reach(of_value);
    const float up = kWeightRange * inverse_of_power(reach);
    uint32_t weights[kSets][2];
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      float x[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float score = scores[s][0][2 * i + h] + scores[s][1][2 * i + h] - surplus[s][h];
          x[i][h] = seen[i] ? score * of_key[i] * factor[s][h] : -INFINITY;
        }
      Sums::rise(s, x);
      weigh(s, x, of_value, up, weights[s]);
    }
#pragma unroll
    for (int group = 0; group < kBlocks / kAdjoining; group++) {
      uint32_t words[kAdjoining * Values::kWords];
      Values::load(words, slot + kKeyBytes, group);
#pragma unroll
      for (int i = 0; i < kAdjoining; i++) {
        uint32_t rows[4];
        Values::operands(rows, words + i * Values::kWords);
#pragma unroll
        for (int s = 0; s < kSets; s++)
          simt::multiply_add(out[s][group * kAdjoining + i], rows, weights[s][0], weights[s][1], __half());
      }
    }
  }

  // Sums over the lanes of a head, and rotates outputs back; after the last tile.
  SIMT_DEV void finish() {
    const float down = reach / kWeightRange;
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      float of_codes[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        sum[s][h] = Sums::over_tokens(sum[s][h]);
        of_codes[h] = Values::kSurplus * Sums::over_tokens(rounded[s][h]);
        rounded[s][h] = sum[s][h];
      }
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[s][b][e] = (out[s][b][e] - of_codes[e & 1]) * down;
      rotate_back(out[s]);
    }
  }

  // Calls put(head, channel, value) for each value of this lane.
  template <class Put> SIMT_DEV void each_out(Put put) const {
    const int g = simt::lane() >> 2, t = simt::lane() & 3;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) put(8 * s + 2 * t + (e & 1), 16 * b + 8 * (e >> 1) + g, out[s][b][e]);
  }

 private:
  // Of a power of two between 2^-126 and 2^126.
  static SIMT_DEV float inverse_of_power(float x) { return bit_cast<float>((254u << 23) - bit_cast<uint32_t>(x)); }

  static SIMT_DEV float finite(__half scale) {
    const float wide = __half2float(scale);
    return fmaf(wide, 0.f, wide);
  }

  template <class Side> static SIMT_DEV void load_codes(unsigned char* slot, const unsigned char* codes, int rows) {
#pragma unroll
    for (int i = 0; i < kBlocks / kAdjoining * Side::kWords; i++) {
      const int piece = 32 * i + simt::lane(), group = piece / (32 * Side::kWords), rest = piece % (32 * Side::kWords);
      const int place = (group * Side::kWords + rest % Side::kWords) * 32 + rest / Side::kWords;
      simt::copy_async(slot + 16 * place, codes + 16 * piece, rows > 0);
    }
  }

  // The query of head l / 4 of a set. The four lanes of a head have its channels 2 (l % 4), the next
  // one, and both plus 8, of each block.
  SIMT_DEV void rotate(int s, const Value* query, bool is_there) {
    using Pair = Pack<Value, 2>;
    const int t = simt::lane() & 3;
    float x[4 * kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Pair pair = is_there ? *reinterpret_cast<const Pair*>(query + 16 * b + 8 * half + 2 * t) : Pair{};
        const uint32_t signs = negative_signs(b / 2) >> (16 * (b & 1) + 8 * half) >> 2 * t;
#pragma unroll
        for (int k = 0; k < 2; k++) x[4 * b + 2 * half + k] = negated(Query::widen(pair.values[k]), signs, k);
      }
    over_indices<1>(x);  // of channels: the bits 0, 3 and those of blocks
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; i++) x[i] = over_bit(over_bit(x[i], 1), 2) * Turn::kNormal;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; i++) most = fmaxf(most, fabsf(x[i]));
    most = over_quad(most, [](float a, float b) { return fmaxf(a, b); });
    const float power = bit_cast<float>(bit_cast<uint32_t>(most) & 0x7F800000u), unit = power > 0.f ? power : 1.f;
    float whole = 0.f;
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t pair = q[s][b][half] = F16::pack(x[4 * b + 2 * half] / unit, x[4 * b + 2 * half + 1] / unit);
        whole += F16::low_of(pair) + F16::high_of(pair);
      }
    whole = over_quad(whole, [](float a, float b) { return a + b; });
#pragma unroll
    for (int h = 0; h < 2; h++) {  // from the lanes that have the query to those that have its scores
      const int lane = 4 * (2 * t + h);
      factor[s][h] = __shfl_sync(~0u, unit, lane);
      surplus[s][h] = Keys::kSurplus * __shfl_sync(~0u, whole, lane);
    }
  }

  template <class Join> static SIMT_DEV float over_quad(float x, Join join) {
    x = join(x, __shfl_xor_sync(~0u, x, 1));
    return join(x, __shfl_xor_sync(~0u, x, 2));
  }

  static SIMT_DEV void rotate_back(float (&of_set)[kBlocks][4]) {
    const int g = simt::lane() >> 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x[2 * kBlocks];  // a lane has the channels g and g + 8 of each block
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; i++) x[i] = of_set[i / 2][2 * (i & 1) + h];
      over_indices<1>(x);
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; i++) {
        const uint32_t signs = negative_signs(i / 4) >> 8 * (i % 4);
        of_set[i / 2][2 * (i & 1) + h] =
            negated(over_bit(over_bit(over_bit(x[i], 4), 8), 16) * Turn::kNormal, signs, g);
      }
    }
  }

  // Outputs are in units of the greatest scale; they shrink when it rises.
  SIMT_DEV void widen_reach(const float (&of_value)[2]) {
    const float most = fmaxf(of_value[0], of_value[1]);
    if (!simt::any(most > reach)) return;
    const float whole = fmaxf(reach, Sums::over_lanes(most, [](float a, float b) { return fmaxf(a, b); }));
    const float next = bit_cast<float>((bit_cast<uint32_t>(whole) + 0x7FFFFFu) & 0xFF800000u),
                shrink = reach * inverse_of_power(next);
    reach = next;
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      rounded[s][0] *= shrink, rounded[s][1] *= shrink;
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[s][b][e] *= shrink;
    }
  }

  // Turns scores into weights times scales, in the tensor cores' layout.
  SIMT_DEV void weigh(int s, float (&x)[2][2], const float (&of_value)[2], float up, uint32_t (&weights)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[i][h] = simt::exp2_fast(x[i][h] - (top[s][h] == -INFINITY ? 0.f : top[s][h]));
        sum[s][h] += x[i][h];
      }
      const uint32_t pair = F16::pack(x[i][0] * (of_value[i] * up), x[i][1] * (of_value[i] * up));
      rounded[s][0] += F16::low_of(pair), rounded[s][1] += F16::high_of(pair);
      weights[i] = simt::transposed(pair);
    }
  }
};

}  // namespace tierd
