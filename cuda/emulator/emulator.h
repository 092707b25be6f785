// simt.h without a GPU: the same names, run by fibers on one CPU thread. NVIDIA's headers of number
// formats compile unchanged.
#pragma once
#include <cmath>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#undef __global__
#undef __device__
#undef __forceinline__
#define __global__
#define __device__
#define __forceinline__ inline

#include "block.h"
#include "copies.h"
#include "warp.h"

#define threadIdx (simt::emulator::current().index)
#define blockIdx (simt::emulator::block().index)
#define blockDim (simt::emulator::block().size)
#define gridDim (simt::emulator::block().grid)

#define SIMT_DEV inline
#define SIMT_SHARED(name) unsigned char* const name = simt::emulator::block().shared
#define SIMT_SYMBOL __attribute__((visibility("default"), weak))  // two units may have a kernel
#define SIMT_KERNEL(NAME, PARAMS, THREADS, BODY)                                                                              \
  extern "C" SIMT_SYMBOL int NAME(unsigned x, unsigned y, unsigned z, unsigned shared_bytes, const void* given) { \
    PARAMS params;                                                                                                            \
    memcpy(&params, given, sizeof params);                                                                                    \
    simt::emulator::launch({x, y, z}, THREADS, shared_bytes, [params] { BODY(params); });                                     \
    return 0;                                                                                                                 \
  }                                                                                                                           \
  extern "C" SIMT_SYMBOL int NAME##_bytes() { return sizeof(PARAMS); }                             \
  extern "C" SIMT_SYMBOL int NAME##_threads() { return THREADS; }

#define SIMT_RESIDENT_KERNEL(NAME, PARAMS, THREADS, BLOCKS, BODY) SIMT_KERNEL(NAME, PARAMS, THREADS, BODY)

using std::max;
using std::min;

namespace simt {

inline int lane() { return emulator::current().lane; }
inline int warp() { return emulator::current().warp; }
inline void assume_global(const void*) {}
inline void forget(int&) {}
inline void load_matrices(uint32_t (&r)[4], const void* row) { emulator::load<false>(r, row); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { emulator::load<true>(r, row); }
inline uint32_t transposed(uint32_t pair) { return emulator::transpose(pair); }
inline uint32_t without_infinities(uint32_t pair, __nv_bfloat16) { return emulator::without_infinities(pair, 0x7F80); }
inline uint32_t without_infinities(uint32_t pair, __half) { return emulator::without_infinities(pair, 0x7C00); }
inline bool any(bool is_so) { return emulator::vote(is_so) != 0; }
template <class T> inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  emulator::multiply<T>(c, a, b0, b1);
}
inline float exp2_fast(float x) { return exp2f(x); }
inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t base) { return (word & mask) | base; }
inline float plus(float a, float b) { return a + b; }
inline float times(float a, float b) { return a * b; }
inline float over(float a, float b) { return a / b; }
inline float root(float x) { return sqrtf(x); }
SIMT_UNSEEN inline void raise_to(uint32_t* number, uint32_t to) { *number = max(*number, to); }
inline float load_of_others(const float* from) { return *from; }
inline void load_of_others(float (&to)[4], const float* from) {
  if (reinterpret_cast<uintptr_t>(from) & 15) emulator::fail("four floats are not aligned to 16 bytes");
  memcpy(to, from, sizeof to);
}
constexpr uint64_t kLaunch = 1 << 24;
SIMT_UNSEEN inline uint64_t launch_of(uint64_t* launches) {  // no memory order
  const uint64_t before = *launches;
  *launches += blockIdx.x == 0 ? kLaunch - (gridDim.x - 1) : 1;
  return before & ~(kLaunch - 1);
}
SIMT_UNSEEN inline bool is_last_of(uint64_t* counter, uint64_t launch, uint32_t blocks) {
  emulator::happens_before(counter);
  const uint64_t before = max(*counter, launch);
  *counter = before + 1;
  emulator::happens_after(counter);
  return before == launch + blocks - 1;
}
inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t both = low | uint64_t(high) << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; i++) picked |= uint32_t(both >> 8 * (selectors >> 4 * i & 7) & 0xFF) << 8 * i;
  return picked;
}

}  // namespace simt

// The emulator's counts since the last call with `clear`, in the order of Counters.
extern "C" __attribute__((used, weak, visibility("default"))) void simt_counters(uint64_t* to, int clear) {
  memcpy(to, &simt::emulator::block().counters, sizeof(simt::emulator::Counters));
  if (clear) simt::emulator::block().counters = {};
}
