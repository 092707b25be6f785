// Number formats of queries, keys and values, and the order of their channels in the tensor cores.
//
// An mma.m16n8k16 sums over 16 channels (Q K^T) or tokens (P V). The sum may take channels in any
// order that both operands share. With 8-bit values a lane so multiplies what a matrix load of
// 16-bit units gives it, with no exchange between lanes.
#pragma once
#include <math.h>

#include "../include/simt.h"

namespace tierd {

template <class To, class From> SIMT_DEV To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Values that are read or written together.
template <class Value, int kCount> struct alignas(kCount * sizeof(Value)) Pack {
  Value values[kCount];
};

// Whether addresses and strides, combined by `or`, allow accesses of this many bytes.
SIMT_DEV bool are_aligned(uint64_t all, int bytes) { return all % bytes == 0; }
SIMT_DEV uint64_t number_of(const void* address) { return reinterpret_cast<uint64_t>(address); }

struct Bf16 {
  using Value = __nv_bfloat16;
  static SIMT_DEV uint32_t pack(float low, float high) { return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high)); }
  static SIMT_DEV Value round(float x) { return __float2bfloat16(x); }
  static SIMT_DEV float widen(Value x) { return __bfloat162float(x); }
  static SIMT_DEV float low_of(uint32_t pair) { return bit_cast<float>(pair << 16); }
  static SIMT_DEV float high_of(uint32_t pair) { return bit_cast<float>(pair & 0xFFFF0000u); }
};

struct F16 {
  using Value = __half;
  static SIMT_DEV uint32_t pack(float low, float high) { return bit_cast<uint32_t>(__floats2half2_rn(low, high)); }
  static SIMT_DEV Value round(float x) { return __float2half(x); }
  static SIMT_DEV float widen(Value x) { return __half2float(x); }
  static SIMT_DEV float low_of(uint32_t pair) { return __half2float(__ushort_as_half(uint16_t(pair))); }
  static SIMT_DEV float high_of(uint32_t pair) { return __half2float(__ushort_as_half(uint16_t(pair >> 16))); }
};

// Queries as `Math` multiplies them. A value that is infinite, or becomes so in fp16, is NaN. Else
// its products could be scores of -inf, and visible tokens would count as absent.
template <class Math> SIMT_DEV uint32_t pack_query(float low, float high) {
  return simt::without_infinities(Math::pack(low, high), typename Math::Value());
}

// A log-sum-exp, in the units of its logarithm: -inf if no token was seen. A sum of NaN gives NaN.
SIMT_DEV float lse_of(float base, float log_of_sum, float sum) { return sum == 0.f ? -INFINITY : base + log_of_sum; }
// The factor of outputs: 0 if no token was seen, NaN with a sum of NaN.
SIMT_DEV float inverse_of(float sum, float factor = 1.f) { return sum == 0.f ? 0.f : factor / sum; }

struct F32 {
  using Value = float;
  static SIMT_DEV Value round(float x) { return x; }
  static SIMT_DEV float widen(Value x) { return x; }
};

// Two e4m3 values as two of fp16, exactly.
SIMT_DEV uint32_t widen_e4m3(uint32_t pair) {
  const __half2_raw wide = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(pair & 0xFFFF), __NV_E4M3);
  return uint32_t(wide.x) | uint32_t(wide.y) << 16;
}

// As Bf16 and F16, to read alone.
struct FromE4m3 {
  using Value = __nv_fp8_storage_t;
  static SIMT_DEV float widen(Value x) { return F16::low_of(widen_e4m3(x)); }
};

// Keys and values as they are stored. Math: the format that multiplies them. Lane quarter t (lane %
// 4) has four channels of each block of 16. For the a and b operands of Q K^T they are first(t),
// +1, second(t), +1. Column n of the accumulator pair (even, odd) of P V is the channel out(is_odd,
// n).
template <class M> struct Stored16 {
  using Math = M;
  static constexpr int kBytes = 2;
  static SIMT_DEV int first(int t) { return 2 * t; }
  static SIMT_DEV int second(int t) { return 8 + 2 * t; }
  static SIMT_DEV int out(int is_odd, int n) { return 8 * is_odd + n; }
};

struct StoredE4m3 {
  using Math = F16;
  static constexpr int kBytes = 1;
  static SIMT_DEV int first(int t) { return 4 * t; }
  static SIMT_DEV int second(int t) { return 4 * t + 2; }
  static SIMT_DEV int out(int is_odd, int n) { return 2 * n + is_odd; }
};

}  // namespace tierd
