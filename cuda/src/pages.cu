// Moving K and V in, out of and between pages, and what a page's keys are like.
#include <math.h>

#include "formats.h"

namespace tierd {

// -- store: new tokens' K and V into pages

struct StoreParams {
  const unsigned char *k, *v;  // [tokens][kv_heads][dim], from one token to the next so many bytes:
  int64_t k_stride, v_stride;
  const int64_t* slots;        // [tokens]: page * page_tokens + offset; negative: the token is not stored
  unsigned char *k_to, *v_to;  // of one layer; strides in bytes
  int64_t page_stride, token_stride, head_stride;
  const float *k_scales, *v_scales;  // null, or [kv_heads]: stored is the value divided by it
  int page_tokens, kv_heads, dim;
};

struct ToE4m3 {
  using Value = __nv_fp8_storage_t;
  static SIMT_DEV Value round(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

template <class From, class To> SIMT_DEV void store(const StoreParams& p) {
  const int64_t slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  const int64_t to = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * p.token_stride;
  const auto* k = reinterpret_cast<const typename From::Value*>(p.k + blockIdx.x * p.k_stride);
  const auto* v = reinterpret_cast<const typename From::Value*>(p.v + blockIdx.x * p.v_stride);
  for (int i = threadIdx.x; i < p.kv_heads * p.dim; i += blockDim.x) {
    const int head = i / p.dim;
    const int64_t at = to + head * p.head_stride + i % p.dim * (int)sizeof(typename To::Value);
    const float k_scale = p.k_scales ? p.k_scales[head] : 1.f, v_scale = p.v_scales ? p.v_scales[head] : 1.f;
    *reinterpret_cast<typename To::Value*>(p.k_to + at) = To::round(From::widen(k[i]) / k_scale);
    *reinterpret_cast<typename To::Value*>(p.v_to + at) = To::round(From::widen(v[i]) / v_scale);
  }
}

// -- copy: rows of bytes between two layouts

// A row is what is contiguous on both sides. Index of a row: [page][layer][K or V][token][head], each with a stride in bytes on either side.
struct Side {
  unsigned char* base;
  const int64_t* layers;  // null, or an address for each layer instead of base (an engine that has a tensor a layer)
  const int* pages;       // null, or which page of this side the i-th is
  int64_t strides[5];
};
struct CopyParams {
  Side from, to;
  int counts[5];
  int row_bytes;  // a multiple of 16
};

SIMT_DEV unsigned char* row_at(const Side& side, const int (&at)[5]) {
  unsigned char* base = side.layers ? reinterpret_cast<unsigned char*>(side.layers[at[1]]) : side.base + at[1] * side.strides[1];
  const int64_t page = side.pages ? side.pages[at[0]] : at[0];
  return base + page * side.strides[0] + at[2] * side.strides[2] + at[3] * side.strides[3] + at[4] * side.strides[4];
}

// Any grid: its threads take pieces of 16 bytes in turn, so that few blocks can do it beside other work.
SIMT_DEV void copy_rows(const CopyParams& p) {
  const int pieces = p.row_bytes / 16;
  int64_t all = pieces;
  for (int d = 0; d < 5; d++) all *= p.counts[d];
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (int64_t)gridDim.x * blockDim.x) {
    int at[5];
    int64_t rest = i / pieces;
    for (int d = 4; d >= 0; d--) at[d] = rest % p.counts[d], rest /= p.counts[d];
    const int offset = i % pieces * 16;
    *reinterpret_cast<uint4*>(row_at(p.to, at) + offset) = *reinterpret_cast<const uint4*>(row_at(p.from, at) + offset);
  }
}

// -- runs: bytes from anywhere to anywhere, such as small pages between the GPU's memory and the host's that it has mapped

struct RunsParams {
  const uint64_t *to, *from;  // [count], addresses: where both are multiples of 16, so many bytes are copied at a time, else one
  const uint32_t* lengths;    // [count], bytes
  int count;
};

// Any grid: its blocks take runs in turn, so that few of them can do it beside other work.
SIMT_DEV void copy_run(const RunsParams& p) {
  for (int run = blockIdx.x; run < p.count; run += gridDim.x) {
    auto* to = reinterpret_cast<unsigned char*>(p.to[run]);
    const auto* from = reinterpret_cast<const unsigned char*>(p.from[run]);
    simt::assume_global(to), simt::assume_global(from);
    const uint32_t length = p.lengths[run], whole = (p.to[run] | p.from[run]) % 16 ? 0 : length / 16;
    for (uint32_t i = threadIdx.x; i < whole; i += blockDim.x) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    for (uint32_t i = whole * 16 + threadIdx.x; i < length; i += blockDim.x) to[i] = from[i];
  }
}

// -- summary: the least and the greatest of each channel of a page's keys (Quest, arXiv 2406.10774, section 3.2)

struct SummaryParams {
  const unsigned char* k;  // of one layer; strides in bytes
  int64_t page_stride, token_stride, head_stride;
  const int *pages, *tokens;  // [count]: page ids, and how many tokens of each are there
  float* bounds;              // [count][kv_heads][2][dim]: least, greatest; +inf, -inf of no tokens
  int kv_heads, dim;
};

struct FromE4m3 {
  using Value = __nv_fp8_storage_t;
  static SIMT_DEV float widen(Value x) { return F16::low_of(widen_e4m3(x)); }
};

template <class From> SIMT_DEV void summarize(const SummaryParams& p) {
  const int page = blockIdx.x, head = blockIdx.y;
  const unsigned char* keys = p.k + p.pages[page] * p.page_stride + head * p.head_stride;
  float* bounds = p.bounds + ((int64_t)page * p.kv_heads + head) * 2 * p.dim;
  for (int channel = threadIdx.x; channel < p.dim; channel += blockDim.x) {
    float least = INFINITY, greatest = -INFINITY;
    for (int token = 0; token < p.tokens[page]; token++) {
      const float x = From::widen(reinterpret_cast<const typename From::Value*>(keys + token * p.token_stride)[channel]);
      least = fminf(least, x), greatest = fmaxf(greatest, x);
    }
    bounds[channel] = least, bounds[p.dim + channel] = greatest;
  }
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(store_bf16_bf16, StoreParams, 256, (store<Bf16, Bf16>))
SIMT_KERNEL(store_f16_f16, StoreParams, 256, (store<F16, F16>))
SIMT_KERNEL(store_bf16_e4m3, StoreParams, 256, (store<Bf16, ToE4m3>))
SIMT_KERNEL(store_f16_e4m3, StoreParams, 256, (store<F16, ToE4m3>))
SIMT_KERNEL(copy_rows_16, CopyParams, 256, copy_rows)
SIMT_KERNEL(copy_runs, RunsParams, 256, copy_run)
SIMT_KERNEL(summarize_bf16, SummaryParams, 128, summarize<Bf16>)
SIMT_KERNEL(summarize_f16, SummaryParams, 128, summarize<F16>)
SIMT_KERNEL(summarize_e4m3, SummaryParams, 128, summarize<FromE4m3>)
