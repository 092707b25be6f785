// Attention over a union of keys, from attention over its parts: splits, tiers, ring hops (online
// softmax; RingAttention, arXiv 2310.01889).
#include <math.h>

#include "formats.h"

namespace tierd {

struct MergeParams {
  const void* outs;   // [parts][rows][dim]
  const float* lses;  // [parts][rows], natural; -inf: a part without tokens, its output is not read; NaN, +inf: the result is NaN
  void* out;          // [rows][dim]
  float* lse;         // [rows]
  int64_t rows;
  int parts, dim;

  // A part's outputs, in packs; each part has `packs` of them.
  template <class Some> SIMT_DEV const Some* outs_of(int part, int64_t packs) const { return static_cast<const Some*>(outs) + part * packs; }
  SIMT_DEV const float* lses_of(int part) const { return lses + part * rows; }
  SIMT_DEV uint64_t numbers() const { return number_of(outs) | number_of(out); }
};

// The same for parts in separate arrays.
struct ScatteredParams {
  const uint64_t *outs, *lses;  // [parts], addresses of [rows][dim] and of [rows]
  void* out;
  float* lse;
  int64_t rows;
  int parts, dim;

  template <class Some> SIMT_DEV const Some* outs_of(int part, int64_t) const { return at<Some>(outs[part]); }
  SIMT_DEV const float* lses_of(int part) const { return at<float>(lses[part]); }
  SIMT_DEV uint64_t numbers() const {
    uint64_t all = number_of(out);
    for (int part = 0; part < parts; part++) all |= outs[part];
    return all;
  }

 private:
  template <class Value> static SIMT_DEV const Value* at(uint64_t address) {
    const auto* array = reinterpret_cast<const Value*>(address);
    simt::assume_global(array);
    return array;
  }
};

constexpr int kAtOnce = 4;  // parts whose loads are in flight together

// A thread takes kCount channels; a block takes as many rows as its threads can serve.
template <class Format, int kCount, class Params> SIMT_DEV void merge_rows(const Params& p) {
  using Some = Pack<typename Format::Value, kCount>;
  const int packs = p.dim / kCount;
  const int64_t all = p.rows * packs;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t row = i / packs;
    float best = -INFINITY, sum = 0.f, out[kCount] = {};
    for (int part = 0; part < p.parts; part++) best = fmaxf(best, p.lses_of(part)[row]);
    const float base = best == -INFINITY ? 0.f : best;
    for (int first = 0; first < p.parts; first += kAtOnce) {
      float shares[kAtOnce];
      Some some[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        const int part = first + k;
        shares[k] = part < p.parts ? expf(p.lses_of(part)[row] - base) : 0.f;
        some[k] = shares[k] > 0.f ? p.template outs_of<Some>(part, all)[i] : Some{};
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        sum += shares[k];
#pragma unroll
        for (int c = 0; c < kCount; c++) out[c] += shares[k] * Format::widen(some[k].values[c]);
      }
    }
    Some whole;
#pragma unroll
    for (int c = 0; c < kCount; c++) whole.values[c] = Format::round(sum == 0.f ? 0.f : out[c] / sum);
    static_cast<Some*>(p.out)[i] = whole;
    if (i % packs == 0) p.lse[row] = lse_of(best, logf(sum), sum);
  }
}

template <class Format, class Params> SIMT_DEV void merge(const Params& p) {
  constexpr int kCount = 16 / sizeof(typename Format::Value);
  if (p.dim % kCount == 0 && are_aligned(p.numbers(), 16)) merge_rows<Format, kCount>(p);
  else merge_rows<Format, 1>(p);
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(merge_bf16, MergeParams, 128, merge<Bf16>)
SIMT_KERNEL(merge_f16, MergeParams, 128, merge<F16>)
SIMT_KERNEL(merge_f32, MergeParams, 128, merge<F32>)
SIMT_KERNEL(merge_scattered_bf16, ScatteredParams, 128, merge<Bf16>)
SIMT_KERNEL(merge_scattered_f16, ScatteredParams, 128, merge<F16>)
SIMT_KERNEL(merge_scattered_f32, ScatteredParams, 128, merge<F32>)
