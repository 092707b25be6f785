// Reads all of a memory range and keeps next to nothing. Benchmarks of other kernels use its speed
// as the memory's limit.
#include "formats.h"

namespace tierd {

struct alignas(16) Piece {
  uint32_t words[4];
};
struct ReadParams {
  const Piece* from;
  uint32_t* sums;  // [blocks][threads]: the exclusive or of a thread's words
  int64_t pieces;
};

constexpr int kReadThreads = 256, kUnderWay = 8;  // loads of one thread in flight

SIMT_DEV void read(const ReadParams& p) {
  uint32_t sum = 0;
  const int64_t step = (int64_t)gridDim.x * kReadThreads * kUnderWay;
  for (int64_t first = (int64_t)blockIdx.x * kReadThreads * kUnderWay + threadIdx.x; first < p.pieces; first += step) {
    Piece pieces[kUnderWay];
#pragma unroll
    for (int i = 0; i < kUnderWay; i++) {
      const int64_t at = first + i * kReadThreads;
      pieces[i] = at < p.pieces ? p.from[at] : Piece{};
    }
#pragma unroll
    for (int i = 0; i < kUnderWay; i++) sum ^= pieces[i].words[0] ^ pieces[i].words[1] ^ pieces[i].words[2] ^ pieces[i].words[3];
  }
  p.sums[blockIdx.x * kReadThreads + threadIdx.x] = sum;
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(read_all, ReadParams, kReadThreads, read)
