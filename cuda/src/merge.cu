// Attention over a union of keys, from attention over its parts: splits, tiers, ring hops (Online softmax; RingAttention, arXiv 2310.01889).
#include <math.h>

#include "formats.h"

namespace tierd {

struct MergeParams {
  const void* outs;   // [parts][rows][dim]
  const float* lses;  // [parts][rows], natural; -inf: a part that saw nothing, whose output is not read
  void* out;          // [rows][dim]
  float* lse;         // [rows]
  int64_t rows;
  int parts, dim;

  template <class Value> SIMT_DEV const Value* outs_of(int part) const { return static_cast<const Value*>(outs) + part * rows * dim; }
  SIMT_DEV const float* lses_of(int part) const { return lses + part * rows; }
};

// The same of parts in arrays of their own.
struct ScatteredParams {
  const uint64_t *outs, *lses;  // [parts], addresses of [rows][dim] and of [rows]
  void* out;
  float* lse;
  int64_t rows;
  int parts, dim;

  template <class Value> SIMT_DEV const Value* outs_of(int part) const { return at<Value>(outs[part]); }
  SIMT_DEV const float* lses_of(int part) const { return at<float>(lses[part]); }

 private:
  template <class Value> static SIMT_DEV const Value* at(uint64_t address) {
    const auto* array = reinterpret_cast<const Value*>(address);
    simt::assume_global(array);
    return array;
  }
};

template <class Format, class Params> SIMT_DEV void merge(const Params& p) {
  using Value = typename Format::Value;
  const int64_t row = blockIdx.x;
  float best = -INFINITY, sum = 0.f;
  for (int part = 0; part < p.parts; part++) best = fmaxf(best, p.lses_of(part)[row]);
  const float base = best == -INFINITY ? 0.f : best;
  for (int part = 0; part < p.parts; part++) sum += expf(p.lses_of(part)[row] - base);
  for (int channel = threadIdx.x; channel < p.dim; channel += blockDim.x) {
    float out = 0.f;
    for (int part = 0; part < p.parts; part++) {
      const float share = expf(p.lses_of(part)[row] - base);
      if (share > 0.f) out += share * Format::widen(p.template outs_of<Value>(part)[row * p.dim + channel]);
    }
    static_cast<Value*>(p.out)[row * p.dim + channel] = Format::round(sum > 0.f ? out / sum : 0.f);
  }
  if (threadIdx.x == 0) p.lse[row] = sum > 0.f ? best + logf(sum) : -INFINITY;
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(merge_bf16, MergeParams, 128, merge<Bf16>)
SIMT_KERNEL(merge_f16, MergeParams, 128, merge<F16>)
SIMT_KERNEL(merge_f32, MergeParams, 128, merge<F32>)
SIMT_KERNEL(merge_scattered_bf16, ScatteredParams, 128, merge<Bf16>)
SIMT_KERNEL(merge_scattered_f16, ScatteredParams, 128, merge<F16>)
SIMT_KERNEL(merge_scattered_f32, ScatteredParams, 128, merge<F32>)
