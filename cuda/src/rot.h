// Rotated codes (tierd/codecs/FORMAT.md, codecs 2 to 4): their places in a tile, and the rotation.
//
// A tile has 16 tokens of one kv head: key codes, value codes, 16 key scales and 16 value scales of
// fp16. Codes are cut into blocks of 16 x 16, of which four adjoin. Rows of a block are tokens for
// keys and channels for values. A lane of a warp has a word of a block with 4 bits, two with 8:
// the A operand of the product m16n8k16.
#pragma once
#include "tile.h"

#ifndef TIERD_DIMS  // head dims of the built kernels; fewer for a quick build
#define TIERD_DIMS(EACH) EACH(64) EACH(96) EACH(128) EACH(256)
#endif

namespace tierd {

constexpr int kAdjoining = 4;  // blocks

// Signs of 32 channels, the lowest bit first; 1: negative. They are the inverted bits of SHA-256 of
// "rotation 1", highest bit of each byte first.
SIMT_DEV uint32_t negative_signs(int word) {
  constexpr uint32_t kWords[8] = {0x0F1A895F, 0x26631100, 0xF1A581AC, 0x7EAFCBC7,
                                  0xE3C3D31E, 0x01309628, 0xE08085B8, 0xE00255E3};
  return kWords[word];
}

template <int kDim> struct Rotation {
  static_assert(kDim == 64 || kDim == 128 || kDim == 256);
  static constexpr int kCodeBytes = kTileTokens * kDim / 8,  // of keys or values; codes: per bit
                       kScaleBytes = 2 * kTileTokens;
  static constexpr float kNormal =  // 1 / sqrt(kDim)
      kDim == 64 ? 0.125f : kDim == 128 ? 0.08838834764831845f : 0.0625f;

  static SIMT_DEV int tile_bytes(int key_bits, int value_bits) {
    return (key_bits + value_bits) * kCodeBytes + 2 * kScaleBytes;
  }
};

// Bit i of the signs negates x.
SIMT_DEV float negated(float x, uint32_t signs, int i) {
  return bit_cast<float>(bit_cast<uint32_t>(x) ^ (signs >> i & 1) << 31);
}

// One butterfly over lanes whose numbers differ in the bit `by`.
SIMT_DEV float over_bit(float x, int by) {
  const float other = __shfl_xor_sync(~0u, x, by);
  return simt::lane() & by ? simt::plus(other, -x) : simt::plus(x, other);
}
// Butterflies over an array's indices, from the distance kFrom on.
template <int kFrom, int kCount> SIMT_DEV void over_indices(float (&x)[kCount]) {
#pragma unroll
  for (int by = kFrom; by < kCount; by *= 2)
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (!(i & by)) {
        const float first = x[i], second = x[i + by];
        x[i] = simt::plus(first, second), x[i + by] = simt::plus(first, -second);
      }
}

// Calls put(token, channel, shift) for each code of a word. word: its number among a tile's codes of
// keys, or of values. shift: of the code's first bit.
template <class Put> SIMT_DEV void each_code(int word, int bits, bool is_value, Put put) {
  const int words = bits / 4, unit = word / words, lane = unit / kAdjoining % 32, pairs = 16 / bits;
  const int block = unit / (32 * kAdjoining) * kAdjoining + unit % kAdjoining;
#pragma unroll 4
  for (int i = 0; i < pairs; i++) {
    const int pair = word % words * pairs + i, row = lane / 4 + 8 * (pair % 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = 2 * (lane % 4) + 8 * (pair / 2) + half;
      put(is_value ? column : row, 16 * block + (is_value ? row : column), 16 * half + bits * i);
    }
  }
}

}  // namespace tierd
