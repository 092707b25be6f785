// Turns pages of 16-bit values into rotated codes and back, equal to the bit to tierd/codecs
// (rotated.py, rot.py). Sums and products are in that code's order, and none are fused.
//
// A block takes one tile after another. Sixteen threads take a row, one token's keys or values:
// thread l has the channels l, l + 16 and so on. No barrier ends a tile: what the next one fills
// first was last read before this one's last barrier.
#include "rot.h"

namespace tierd {

struct RotateParams {
  const uint64_t *plain, *coded;  // [pages], addresses: of values, and of payloads; multiples of 16
  // Of encoding, [pages][2], zeroed: the square of the largest error of a row, and the largest
  // magnitude of a value, as float32 without a sign. Not finite: the page cannot be encoded.
  uint32_t* found;
  int64_t strides[4];  // of plain pages in bytes: layer, keys or values, token, kv head
  int pages, layers, kv_heads, tokens, key_bits, value_bits;
};

constexpr int kRotThreads = 128, kRows = 2 * kTileTokens, kTeam = 16;

template <class Format> constexpr float kGreatest = 65504.f;
template <> constexpr float kGreatest<Bf16> = 0x1.FEp127f;

template <class Format, int kDim> struct Tiles {
  using Value = typename Format::Value;
  using Turn = Rotation<kDim>;
  static constexpr int kEach = kDim / kTeam;                          // channels of a thread
  static constexpr int kRowBytes = 2 * kDim + 32, kCodesOfRow = kDim + 16;  // padded: two rows use different banks
  static constexpr int kChunks = kDim / 8;                            // of 16 bytes in a row

  // A tile's memory on both sides, and a block's shared memory for it.
  const RotateParams& p;
  int page, tile;
  unsigned char *plain, *coded, *rows, *codes, *packed;

  SIMT_DEV Tiles(const RotateParams& p, unsigned char* shared)
      : p(p), rows(shared), codes(rows + kRows * kRowBytes), packed(codes + kRows * kCodesOfRow) {}

  SIMT_DEV int tile_bytes() const { return Turn::tile_bytes(p.key_bits, p.value_bits); }
  SIMT_DEV int values_at() const { return p.key_bits * Turn::kCodeBytes; }
  SIMT_DEV int scales_at() const { return tile_bytes() - 2 * Turn::kScaleBytes; }

  SIMT_DEV void find(int64_t number) {
    const int tiles = (p.tokens + kTileTokens - 1) / kTileTokens, in_page = p.layers * p.kv_heads * tiles,
              at = number % in_page;
    page = number / in_page, tile = at % tiles;
    plain = reinterpret_cast<unsigned char*>(p.plain[page]) + at / tiles / p.kv_heads * p.strides[0] +
        at / tiles % p.kv_heads * p.strides[3];
    coded = reinterpret_cast<unsigned char*>(p.coded[page]) + (int64_t)at * tile_bytes();
    simt::assume_global(plain), simt::assume_global(coded);
  }

  // Calls put(a chunk in the page, the same in shared memory, whether its token exists).
  template <class Put> SIMT_DEV void each_chunk(Put put) const {
    for (int i = threadIdx.x; i < kRows * kChunks; i += kRotThreads) {
      const int row = i / kChunks, chunk = i % kChunks, token = tile * kTileTokens + row % kTileTokens;
      put(plain + row / kTileTokens * p.strides[1] + token * p.strides[2] + 16 * chunk,
          rows + row * kRowBytes + 16 * chunk, token < p.tokens);
    }
  }

  // Calls put(word, its codes' bits, its row's offset, ...) for the words of keys and values.
  template <class Put> SIMT_DEV void each_word(Put put) const {
    for (int side = 0; side < 2; side++) {
      const int bits = side ? p.value_bits : p.key_bits, words = bits * Turn::kCodeBytes / 4;
      for (int word = threadIdx.x; word < words; word += kRotThreads) put(side, word, bits);
    }
  }
  SIMT_DEV unsigned char& code_of(int side, int token, int channel) const {
    return codes[(side * kTileTokens + token) * kCodesOfRow + channel];
  }

  SIMT_DEV static int mine() { return threadIdx.x % kTeam; }
  SIMT_DEV Value& value_of(int row, int i) const {
    return reinterpret_cast<Value*>(rows + row * kRowBytes)[kTeam * i + mine()];
  }
  SIMT_DEV static float signed_as(float x, int i) { return negated(x, negative_signs(i / 2) >> 16 * (i % 2), mine()); }

  SIMT_DEV static void transform(float (&x)[kEach]) {
    for (int by = 1; by < kTeam; by *= 2)
#pragma unroll
      for (int i = 0; i < kEach; i++) x[i] = over_bit(x[i], by);
    over_indices<1>(x);
#pragma unroll
    for (int i = 0; i < kEach; i++) x[i] = simt::times(x[i], Turn::kNormal);
  }
};

// Codes of rows.
template <class Format, int kDim> struct Encoder : Tiles<Format, kDim> {
  using Base = Tiles<Format, kDim>;
  using Base::p, Base::kEach;

  uint32_t off = 0, most = 0;  // of the rows so far

  using Base::Base;

  // In the order of the codecs: sixteen lanes over the row, then halves.
  template <class Term> static SIMT_DEV float sum(Term term) {
    float total = term(0);
#pragma unroll
    for (int i = 1; i < kEach; i++) total = simt::plus(total, term(i));
    for (int by = kTeam / 2; by; by /= 2) total = simt::plus(total, __shfl_xor_sync(~0u, total, by));
    return total;
  }
  static SIMT_DEV float square(float x) { return simt::times(x, x); }
  static SIMT_DEV uint32_t magnitude(float x) { return bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }

  SIMT_DEV void encode_row(int row) {
    const int side = row / kTileTokens, bits = side ? p.value_bits : p.key_bits;
    float y[kEach], middles[kEach], greatest = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float x = Format::widen(this->value_of(row, i));
      most = max(most, magnitude(x));
      y[i] = this->signed_as(x, i);
    }
    this->transform(y);
#pragma unroll
    for (int i = 0; i < kEach; i++) greatest = fmaxf(greatest, fabsf(y[i]));
    for (int by = kTeam / 2; by; by /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, by));
    const float whole = sum([&](int i) { return square(y[i]); });
    const float step = step_of(simt::root(simt::times(whole, 1.f / kDim)), greatest, bits);
    const float low = bits == 8 ? -128.f : -8.f;
    const bool is_zero = step < float(1e-17 / 1000);
    const float inverse = simt::over(1.f, is_zero ? 1.f : step);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float k = rintf(fminf(fmaxf(simt::plus(simt::times(y[i], inverse), -0.5f), low), -1.f - low));
      this->code_of(side, row % kTileTokens, kTeam * i + this->mine()) = uint8_t(k - low);
      y[i] = simt::times(y[i], k + 0.5f), middles[i] = k + 0.5f;
    }
    const float product = sum([&](int i) { return y[i]; }), squares = sum([&](int i) { return square(middles[i]); });
    const __half scale = __float2half(is_zero ? 0.f : simt::over(whole, product));
    if (this->mine() == 0) reinterpret_cast<__half*>(this->packed)[row] = scale;
    const float s = __half2float(scale),
                rest = simt::plus(simt::plus(whole, -simt::times(simt::plus(s, s), product)),
                    simt::times(simt::times(s, s), squares));
    off = max(off, magnitude(simt::plus(rest < 0.f ? 0.f : rest, simt::times(whole, 5e-6f))));  // NaN stays
  }

  // STEPS of rotated.py: a share of the largest value, near the step that fits normal values best.
  static SIMT_DEV float step_of(float mean, float greatest, int bits) {
    const float peak = simt::times(greatest, bits == 8 ? float(1 / 127.5) : 0.12f);
    const float least = simt::times(mean, bits == 8 ? 0.0308f : float(0.8 * 0.3352)),
                top = simt::times(mean, bits == 8 ? 1.f : float(1.25 * 0.3352));
    const float step = peak > least ? peak : least;  // NaN stays
    return step > top ? top : step;
  }

  SIMT_DEV void report() {
    for (int by = 16; by; by /= 2)
      off = max(off, __shfl_xor_sync(~0u, off, by)), most = max(most, __shfl_xor_sync(~0u, most, by));
    if (simt::lane() == 0)
      simt::raise_to(p.found + 2 * this->page, off), simt::raise_to(p.found + 2 * this->page + 1, most);
    off = most = 0;
  }

  SIMT_DEV void encode() {
    this->each_chunk(
        [](const unsigned char* from, unsigned char* to, bool is_there) { simt::copy_async(to, from, is_there); });
    simt::commit_copies();
    simt::await_copies<0>();
    __syncthreads();
    for (int row = threadIdx.x / kTeam; row < kRows; row += kRotThreads / kTeam) encode_row(row);
    report();
    __syncthreads();
    this->each_word([&](int side, int word, int bits) {
      uint32_t all = 0;
      each_code(word, bits, side,
          [&](int token, int channel, int shift) { all |= uint32_t(this->code_of(side, token, channel)) << shift; });
      reinterpret_cast<uint32_t*>(this->coded + (side ? this->values_at() : 0))[word] = all;
    });
    if (threadIdx.x < kRows / 2)
      reinterpret_cast<uint32_t*>(this->coded + this->scales_at())[threadIdx.x] =
          reinterpret_cast<const uint32_t*>(this->packed)[threadIdx.x];
  }
};

template <class Format, int kDim> struct Decoder : Tiles<Format, kDim> {
  using Base = Tiles<Format, kDim>;
  using Base::p, Base::kEach;
  using Base::Base;

  SIMT_DEV void decode_row(int row) {
    const int side = row / kTileTokens, bits = side ? p.value_bits : p.key_bits;
    const float scale = __half2float(reinterpret_cast<const __half*>(this->packed + this->scales_at())[row]),
                offset = bits == 8 ? 127.5f : 7.5f;
    float y[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++)
      y[i] = simt::times(float(this->code_of(side, row % kTileTokens, kTeam * i + this->mine())) - offset, scale);
    this->transform(y);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float x = this->signed_as(y[i], i), most = kGreatest<Format>;
      this->value_of(row, i) = Format::round(x > most ? most : x < -most ? -most : x);
    }
  }

  SIMT_DEV void decode() {
    for (int i = threadIdx.x; i < this->tile_bytes() / 16; i += kRotThreads)
      simt::copy_async(this->packed + 16 * i, this->coded + 16 * i, true);
    simt::commit_copies();
    simt::await_copies<0>();
    __syncthreads();
    this->each_word([&](int side, int word, int bits) {
      const uint32_t all = reinterpret_cast<const uint32_t*>(this->packed + (side ? this->values_at() : 0))[word];
      each_code(word, bits, side, [&](int token, int channel, int shift) {
        this->code_of(side, token, channel) = all >> shift & ((1 << bits) - 1);
      });
    });
    __syncthreads();
    for (int row = threadIdx.x / kTeam; row < kRows; row += kRotThreads / kTeam) decode_row(row);
    __syncthreads();
    this->each_chunk([](unsigned char* to, const unsigned char* from, bool is_there) {
      if (is_there) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    });
  }
};

// Works with any grid, so that few blocks can run beside other work.
template <class Work> SIMT_DEV void each_tile(const RotateParams& p, Work work) {
  const int64_t tiles = (int64_t)p.pages * p.layers * p.kv_heads * ((p.tokens + kTileTokens - 1) / kTileTokens);
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) work(i);
}

template <class Format, int kDim> SIMT_DEV void rotate(const RotateParams& p) {
  SIMT_SHARED(raw);
  Encoder<Format, kDim> encoder(p, raw);
  each_tile(p, [&](int64_t i) { encoder.find(i), encoder.encode(); });
}

template <class Format, int kDim> SIMT_DEV void unrotate(const RotateParams& p) {
  SIMT_SHARED(raw);
  Decoder<Format, kDim> decoder(p, raw);
  each_tile(p, [&](int64_t i) { decoder.find(i), decoder.decode(); });
}

}  // namespace tierd

using namespace tierd;

#define ROT_PAGES(FORMAT, NAME, DIM)                                                                 \
  SIMT_RESIDENT_KERNEL(rotate_##NAME##_##DIM, RotateParams, kRotThreads, 4, (rotate<FORMAT, DIM>)) \
  SIMT_RESIDENT_KERNEL(unrotate_##NAME##_##DIM, RotateParams, kRotThreads, 4, (unrotate<FORMAT, DIM>))
#define ROT_64 ROT_PAGES(Bf16, bf16, 64) ROT_PAGES(F16, f16, 64)
#define ROT_96
#define ROT_128 ROT_PAGES(Bf16, bf16, 128) ROT_PAGES(F16, f16, 128)
#define ROT_256 ROT_PAGES(Bf16, bf16, 256) ROT_PAGES(F16, f16, 256)
#define ROT_DIM(DIM) ROT_##DIM

TIERD_DIMS(ROT_DIM)
