// One source for two machines: the part of the SIMT model that kernels need.
//
// For nvcc: thin names over CUDA and PTX (sm_80 and newer). For g++: the emulator in ../emulator,
// in which every CUDA thread is a fiber. A kernel includes this file alone and takes one plain
// struct by value. The fatbin and the emulator's library so use the same symbol.
#pragma once
#include <cstdint>
#include <cstring>

// SIMT_CHECK(is_right, format, ...): in a checked build (-DTIERD_CHECKED) a kernel that finds a
// wrong value reports it and ends the launch. Other builds check nothing. It checks the callers'
// array values, which no host code reads back before a launch.
#if !defined(TIERD_CHECKED)
#define SIMT_CHECK(IS_RIGHT, FORMAT, ...)
#elif defined(__CUDACC__)
#include <cstdio>
#define SIMT_CHECK(IS_RIGHT, FORMAT, ...) \
  do { \
    if (!(IS_RIGHT)) printf("tierd: " FORMAT "\n" __VA_OPT__(, ) __VA_ARGS__), __trap(); \
  } while (0)
#else
#define SIMT_CHECK(IS_RIGHT, FORMAT, ...) \
  do { \
    char said[200]; \
    if (!(IS_RIGHT)) snprintf(said, sizeof said, FORMAT __VA_OPT__(, ) __VA_ARGS__), simt::emulator::fail(said); \
  } while (0)
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define SIMT_DEV __device__ __forceinline__
#define SIMT_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SIMT_KERNEL(NAME, PARAMS, THREADS, BODY) SIMT_RESIDENT_KERNEL(NAME, PARAMS, THREADS, 0, BODY)
// BLOCKS: number that must fit a multiprocessor by their registers; 0: ptxas decides, and may spill
// to fit one more.
#define SIMT_RESIDENT_KERNEL(NAME, PARAMS, THREADS, BLOCKS, BODY) \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ PARAMS params) { BODY(params); }

namespace simt {

SIMT_DEV int lane() { return threadIdx.x & 31; }
SIMT_DEV int warp() { return threadIdx.x >> 5; }
SIMT_DEV uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Keeps the compiler from knowing x, so that it computes what follows from it again instead of
// keeping it in registers.
SIMT_DEV void forget(int& x) { asm volatile("" : "+r"(x)); }

// Says that p points to global memory: without it the compiler must assume that it may be shared
// memory.
SIMT_DEV void assume_global(const void* p) { __builtin_assume(__isGlobal(p)); }

// Copies 16 bytes to shared memory, at any time before the wait for its group. Without `is_there`
// it writes zeros and does not read the source.
SIMT_DEV void copy_async(void* to, const void* from, bool is_there) {
  const int bytes = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
SIMT_DEV void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most N of this thread's groups are in flight; a barrier shows the bytes to other
// threads.
template <int N> SIMT_DEV void await_copies() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// Loads four 8x8 matrices of 16-bit units; lane l gives the address of the row l % 8 of matrix l /
// 8.
SIMT_DEV void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
SIMT_DEV void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Transposes an 8x8 matrix of 16-bit units, of which lane l has two of row l / 4.
SIMT_DEV uint32_t transposed(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(turned) : "r"(pair));
  return turned;
}

// A pair of numbers with infinities replaced by NaN: 0 times the number, plus the number.
SIMT_DEV uint32_t without_infinities(uint32_t pair, __nv_bfloat16) {
  uint32_t finite;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;\n" : "=r"(finite) : "r"(pair), "r"(0));
  return finite;
}
SIMT_DEV uint32_t without_infinities(uint32_t pair, __half) {
  uint32_t finite;
  asm("fma.rn.f16x2 %0, %1, %2, %1;\n" : "=r"(finite) : "r"(pair), "r"(0));
  return finite;
}

// Whether it is true for any lane.
SIMT_DEV bool any(bool is_so) { return __any_sync(~0u, is_so); }

// c += a * b; a 16x16, b 16x8, c 16x8 in the layout of PTX's mma.m16n8k16.
SIMT_DEV void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
SIMT_DEV void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

SIMT_DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounded sums and products, which the compiler may not fuse: codes must be equal to the bit.
SIMT_DEV float plus(float a, float b) { return __fadd_rn(a, b); }
SIMT_DEV float times(float a, float b) { return __fmul_rn(a, b); }
SIMT_DEV float over(float a, float b) { return __fdiv_rn(a, b); }
SIMT_DEV float root(float x) { return __fsqrt_rn(x); }

// (word & mask) | base in one instruction. The compiler alone makes two of it, since an instruction
// has room for one of two constants.
SIMT_DEV uint32_t and_or(uint32_t word, uint32_t mask, uint32_t base) {
  uint32_t both;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(both) : "r"(word), "r"(mask), "r"(base));
  return both;
}

// Raises a number that other blocks raise too. Floats without a sign compare like these numbers.
SIMT_DEV void raise_to(uint32_t* number, uint32_t to) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;\n" ::"l"(number), "r"(to) : "memory");
}

// Loads four floats that another block may have written, past the multiprocessor's own cache.
SIMT_DEV void load_of_others(float (&to)[4], const float* from) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
SIMT_DEV float load_of_others(const float* from) { return __ldcg(from); }

// A number for this launch, the same in all of its blocks and above that of every earlier launch.
// One thread of each block asks once; `launches` serves one grid size alone. Each launch adds
// kLaunch to it, however its blocks overlap others', so each launch has its own number. The
// number's lower bits are 0, for counters that begin at it.
constexpr uint64_t kLaunch = 1 << 24;  // more than blocks of a grid
SIMT_DEV uint64_t launch_of(uint64_t* launches) {
  const uint64_t mine = blockIdx.x == 0 ? kLaunch - (gridDim.x - 1) : 1;
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;\n" : "=l"(before) : "l"(launches), "l"(mine) : "memory");
  return before & ~(kLaunch - 1);
}

// Whether the block is the last of so many of this launch to arrive, and may read the others'
// earlier writes. One thread asks, behind its block's barrier. Counts of earlier launches are below
// this launch's number and so ignored: the counter needs no clearing.
SIMT_DEV bool is_last_of(uint64_t* counter, uint64_t launch, uint32_t blocks) {
  uint64_t before;
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;\n" ::"l"(counter), "l"(launch) : "memory");
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;\n" : "=l"(before) : "l"(counter) : "memory");
  return before == launch + blocks - 1;
}

// Bytes of {high, low} picked by four selectors of four bits each.
SIMT_DEV uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selectors) { return __byte_perm(low, high, selectors); }

}  // namespace simt
#else
#include "../emulator/emulator.h"
#endif
