// What a memory gives to a kernel that only reads: all of a range is read, and next to nothing is kept. The limit that benchmarks of other kernels name.
#include "formats.h"

namespace tierd {

struct alignas(16) Piece {
  uint32_t words[4];
};
struct ReadParams {
  const Piece* from;
  uint32_t* sums;  // [blocks][threads]: the exclusive or of the words that a thread read
  int64_t pieces;
};

constexpr int kReadThreads = 256, kUnderWay = 8;  // loads of one thread that nothing waits for

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
