// Copies K and V into, out of and between pages, and computes bounds of a page's keys.
#include <math.h>

#include "formats.h"

namespace tierd {

// -- store: new tokens' K and V into pages

struct StoreParams {
  const unsigned char *k, *v;  // [tokens][kv_heads][dim]; bytes from one token to the next:
  int64_t k_stride, v_stride;
  const int64_t* slots;        // [tokens]: page * page_tokens + offset; negative: the token is not stored
  unsigned char *k_to, *v_to;  // of one layer; strides in bytes
  int64_t page_stride, token_stride, head_stride;
  const float *k_scales, *v_scales;  // null, or [kv_heads]: values are divided by it
  int page_tokens, kv_heads, dim, pages;
};

struct ToE4m3 {
  using Value = __nv_fp8_storage_t;
  static SIMT_DEV Value round(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
};

// Each thread takes kCount values of a token at a time: of its keys first, then of its values.
template <class From, class To, int kCount> SIMT_DEV void store_token(const StoreParams& p, int64_t slot) {
  using In = Pack<typename From::Value, kCount>;
  using Out = Pack<typename To::Value, kCount>;
  const int64_t to = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * p.token_stride;
  const int packs = p.kv_heads * p.dim / kCount;
  for (int i = threadIdx.x; i < 2 * packs; i += blockDim.x) {
    const bool is_key = i < packs;
    const int at = is_key ? i : i - packs, head = at * kCount / p.dim, channel = at * kCount % p.dim;
    const unsigned char* from = is_key ? p.k + blockIdx.x * p.k_stride : p.v + blockIdx.x * p.v_stride;
    const float* scales = is_key ? p.k_scales : p.v_scales;
    const In in = reinterpret_cast<const In*>(from)[at];
    Out out;
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      const float x = From::widen(in.values[j]);
      out.values[j] = To::round(scales ? x / scales[head] : x);
    }
    *reinterpret_cast<Out*>((is_key ? p.k_to : p.v_to) + to + head * p.head_stride + channel * (int)sizeof(typename To::Value)) = out;
  }
}

template <class From, class To> SIMT_DEV void store(const StoreParams& p) {
  const int64_t slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  SIMT_CHECK(slot / p.page_tokens < p.pages, "token %u: slot %lld, and the pool has %d pages of %d tokens", blockIdx.x, (long long)slot, p.pages, p.page_tokens);
  // Pages are aligned; new tokens may have any address.
  const bool is_aligned = are_aligned(number_of(p.k) | number_of(p.v) | p.k_stride | p.v_stride, 16) && p.dim % 8 == 0;
  if (is_aligned) store_token<From, To, 8>(p, slot);
  else store_token<From, To, 1>(p, slot);
}

// -- copy: rows of bytes between two layouts

// A row is contiguous on both sides. Index of a row: [page][layer][K or V][token][head]; each index
// has a stride in bytes on either side.
struct Side {
  unsigned char* base;
  const int64_t* layers;  // null, or an address for each layer instead of base (an engine with a tensor per layer)
  const int* pages;       // null, or the number on this side of the i-th page
  int64_t strides[5];
  int64_t count;         // of its pages
};
struct CopyParams {
  Side from, to;
  int counts[5];
  int row_bytes;  // a multiple of 16
};

SIMT_DEV unsigned char* row_at(const Side& side, const int (&at)[5]) {
  unsigned char* base = side.layers ? reinterpret_cast<unsigned char*>(side.layers[at[1]]) : side.base + at[1] * side.strides[1];
  const int64_t page = side.pages ? side.pages[at[0]] : at[0];
  SIMT_CHECK(page >= 0 && page < side.count, "page %d of a copy: id %lld, and there are %lld pages", at[0], (long long)page, (long long)side.count);
  return base + page * side.strides[0] + at[2] * side.strides[2] + at[3] * side.strides[3] + at[4] * side.strides[4];
}

constexpr int kSegment = 128;  // pieces of 16 bytes: longer rows are split

// Works with any grid, so that few blocks can run beside other work. A team is as many threads as a
// segment can use, at most a warp; teams take segments in turn. A segment's place is computed once,
// in 32 bits: 64-bit divisions would take many times as long as the copy.
SIMT_DEV void copy_rows(const CopyParams& p) {
  const uint32_t pieces = p.row_bytes / 16, segments = (pieces + kSegment - 1) / kSegment;
  int team = 1;
  while (team < 32 && team < (int)pieces) team *= 2;
  uint32_t each = segments;  // of a page
  for (int d = 1; d < 5; d++) each *= p.counts[d];
  const int64_t all = (int64_t)each * p.counts[0], teams = (int64_t)gridDim.x * blockDim.x / team;
  for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / team; i < all; i += teams) {
    int at[5];
    at[0] = all > UINT32_MAX ? i / each : (uint32_t)i / each;
    uint32_t rest = i - (int64_t)at[0] * each;
    const uint32_t first = rest % segments * kSegment, end = min(first + kSegment, pieces);
    rest /= segments;
    for (int d = 4; d > 0; d--) at[d] = rest % p.counts[d], rest /= p.counts[d];
    auto* __restrict__ to = reinterpret_cast<uint4*>(row_at(p.to, at));
    const auto* __restrict__ from = reinterpret_cast<const uint4*>(row_at(p.from, at));
#pragma unroll 4
    for (uint32_t piece = first + threadIdx.x % team; piece < end; piece += team) to[piece] = from[piece];
  }
}

// -- runs: bytes between any addresses, such as small pages between GPU memory and mapped host
// memory

struct RunsParams {
  const uint64_t *to, *from;  // [count], addresses: if both are multiples of 16, 16 bytes are copied at a time, else one
  const uint32_t* lengths;    // [count], bytes
  int count;
};

// Works with any grid: its blocks take runs in turn, so that few blocks can run beside other work.
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

// -- summary: bounds of each channel of a page's keys (Quest, arXiv 2406.10774, section 3.2); NaN
// if a key is

struct SummaryParams {
  const unsigned char* k;  // of one layer; strides in bytes
  int64_t page_stride, token_stride, head_stride;
  const int *pages, *tokens;  // [count]: page ids, and number of tokens in each
  float* bounds;              // [count][kv_heads][2][dim]: least, greatest; +inf, -inf without tokens
  int kv_heads, dim, pool_pages, page_tokens;
};

template <class From> SIMT_DEV void summarize(const SummaryParams& p) {
  const int page = blockIdx.x, head = blockIdx.y;
  SIMT_CHECK(p.pages[page] >= 0 && p.pages[page] < p.pool_pages && p.tokens[page] >= 0 && p.tokens[page] <= p.page_tokens,
             "page %d of bounds: id %d and %d tokens, and the pool has %d pages of %d", page, p.pages[page], p.tokens[page], p.pool_pages, p.page_tokens);
  const unsigned char* keys = p.k + p.pages[page] * p.page_stride + head * p.head_stride;
  float* bounds = p.bounds + ((int64_t)page * p.kv_heads + head) * 2 * p.dim;
  for (int channel = threadIdx.x; channel < p.dim; channel += blockDim.x) {
    float least = INFINITY, greatest = -INFINITY;
    for (int token = 0; token < p.tokens[page]; token++) {
      const float x = From::widen(reinterpret_cast<const typename From::Value*>(keys + token * p.token_stride)[channel]);
      least = x < least || x != x ? x : least, greatest = x > greatest || x != x ? x : greatest;
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
