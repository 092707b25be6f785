// Sixteen tokens of one kv head's keys or values in shared memory: loads, and fragments for mma.
//
// Rows consist of chunks of 16 bytes. Chunks are swapped within a row, so that the eight rows of a
// matrix load use different banks.
#pragma once
#include "formats.h"

namespace tierd {

constexpr int kTileTokens = 16;
constexpr float kLn2 = 0.693147180559945f;

template <class Stored, int kDim> struct Tile {
  static constexpr int kRowBytes = kDim * Stored::kBytes, kChunks = kRowBytes / 16, kBytes = kTileTokens * kRowBytes;
  static constexpr int kBlocks = kDim / 16;  // of channels
  // Chunks that a row can swap: the largest power of two that divides their number, at most 8 for
  // all banks.
  static constexpr int kSwap = (kChunks & -kChunks) < 8 ? (kChunks & -kChunks) : 8;
  static constexpr int kPieces = kTileTokens * kChunks / 32;  // of 16 bytes, for each lane
  static_assert(kDim % 32 == 0 && kTileTokens * kChunks % 32 == 0);

  static SIMT_DEV int at(int row, int chunk) { return row * kRowBytes + 16 * (chunk ^ (row / (8 / kSwap) & (kSwap - 1))); }

  // A warp's part. Rows from `rows` on are zeros and are not read: stale bytes may be NaN, and 0 *
  // NaN is NaN.
  static SIMT_DEV void load(unsigned char* tile, const unsigned char* first_row, int64_t row_stride_bytes, int rows, int lane = simt::lane()) {
#pragma unroll(kDim > 128 ? 4 : kPieces)  // more addresses at once need more registers than kernels of 256 channels have
    for (int i = 0; i < kPieces; i++) {
      const int piece = i * 32 + lane, row = piece / kChunks, chunk = piece % kChunks;
      simt::copy_async(tile + at(row, chunk), first_row + row * row_stride_bytes + 16 * chunk, row < rows);
    }
  }

  // b operands of Q K^T. halves: tokens 0 to 7 and 8 to 15; two words each for channel block
  // `block`.
  static SIMT_DEV void keys(uint32_t (&halves)[2][2], const unsigned char* tile, int block, uint32_t (&spare)[2], int lane = simt::lane()) {
    uint32_t r[4];
    if constexpr (Stored::kBytes == 2) {
      simt::load_matrices(r, tile + at((lane & 7) + (lane >> 4 << 3), 2 * block + (lane >> 3 & 1)));
      halves[0][0] = r[0], halves[0][1] = r[1], halves[1][0] = r[2], halves[1][1] = r[3];
    } else {  // one chunk is a block: a load brings two blocks, `spare` keeps the odd one
      if (block % 2 == 0) {
        simt::load_matrices(r, tile + at((lane & 7) + (lane >> 4 << 3), block + (lane >> 3 & 1)));
        spare[0] = r[1], spare[1] = r[3];
      } else {
        r[0] = spare[0], r[2] = spare[1];
      }
      halves[0][0] = widen_e4m3(r[0]), halves[0][1] = widen_e4m3(r[0] >> 16);
      halves[1][0] = widen_e4m3(r[2]), halves[1][1] = widen_e4m3(r[2] >> 16);
    }
  }

  // b operands of P V: two words each for the even and the odd accumulator of channel block
  // `block`.
  static SIMT_DEV void values(uint32_t (&pair)[2][2], const unsigned char* tile, int block, uint32_t (&spare)[2]) {
    const int lane = simt::lane();
    uint32_t r[4];
    if constexpr (Stored::kBytes == 2) {
      simt::load_matrices_transposed(r, tile + at((lane & 7) + ((lane >> 3 & 1) << 3), 2 * block + (lane >> 4)));
      pair[0][0] = r[0], pair[0][1] = r[1], pair[1][0] = r[2], pair[1][1] = r[3];
    } else {
      if (block % 2 == 0) {
        simt::load_matrices_transposed(r, tile + at((lane & 7) + ((lane >> 3 & 1) << 3), block + (lane >> 4)));
        spare[0] = r[2], spare[1] = r[3];
      } else {
        r[0] = spare[0], r[1] = spare[1];
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {  // a unit is two channels of a token; the result is two tokens of a channel
        pair[0][half] = widen_e4m3(simt::pick_bytes(r[half], 0, 0x20));
        pair[1][half] = widen_e4m3(simt::pick_bytes(r[half], 0, 0x31));
      }
    }
  }
};

}  // namespace tierd
