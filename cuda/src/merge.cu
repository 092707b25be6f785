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
};

template <class Format> SIMT_DEV void merge(const MergeParams& p) {
  const int64_t row = blockIdx.x;
  float best = -INFINITY, sum = 0.f;
  for (int part = 0; part < p.parts; part++) best = fmaxf(best, p.lses[part * p.rows + row]);
  const float base = best == -INFINITY ? 0.f : best;
  for (int part = 0; part < p.parts; part++) sum += expf(p.lses[part * p.rows + row] - base);
  const auto* outs = static_cast<const typename Format::Value*>(p.outs);
  for (int channel = threadIdx.x; channel < p.dim; channel += blockDim.x) {
    float out = 0.f;
    for (int part = 0; part < p.parts; part++) {
      const float share = expf(p.lses[part * p.rows + row] - base);
      if (share > 0.f) out += share * Format::widen(outs[(part * p.rows + row) * p.dim + channel]);
    }
    static_cast<typename Format::Value*>(p.out)[row * p.dim + channel] = Format::round(sum > 0.f ? out / sum : 0.f);
  }
  if (threadIdx.x == 0) p.lse[row] = sum > 0.f ? best + logf(sum) : -INFINITY;
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(merge_bf16, MergeParams, 128, merge<Bf16>)
SIMT_KERNEL(merge_f16, MergeParams, 128, merge<F16>)
SIMT_KERNEL(merge_f32, MergeParams, 128, merge<F32>)
