// Rotated codes: tierd/codecs/rotated.py. Rows are done in batches of 16, as in a page's tile.

constexpr int kRows = 16;  // of a batch; also the lanes of sums over a row

template <int kDim> struct Batch {
  alignas(64) float y[kRows][kDim];
  alignas(64) uint8_t codes[kRows][kDim];
  alignas(64) float lanes[2][kRows][16];  // of two sums over each row
  alignas(64) float square[kRows], peak[kRows], step[kRows], product[kRows], middles[kRows];
  alignas(64) uint16_t scales[kRows];
};

// The Hadamard transform, not normalised. The distance of the butterflies doubles from 1.
template <int kDim> TIERD_INLINE void hadamard(F* v) {
  constexpr int kCount = kDim / kLanes;
#pragma GCC unroll 16
  for (int i = 0; i < kCount; i++) {
    v[i] = butterfly<2>(butterfly<1>(v[i]));
    if constexpr (kLanes > 4) v[i] = butterfly<4>(v[i]);
    if constexpr (kLanes > 8) v[i] = butterfly<8>(v[i]);
  }
#pragma GCC unroll 8
  for (int width = 1; width < kCount; width *= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; i++) {
      if (i & width) continue;
      const F a = v[i], b = v[i + width];
      v[i] = a + b;
      v[i + width] = a - b;
    }
  }
}

struct Add {
  F operator()(F a, F b) const { return a + b; }
};
struct Most {
  F operator()(F a, F b) const { return most(a, b); }
};

// Folds the 16 lanes of each row by halves.
template <class Op> TIERD_INLINE void fold(const float (*lanes)[16], float* to, Op op) {
#if TIERD_LANES == 16
  const auto row = [&](int i) { return (__m512)load<F>(lanes[i]); };
  const auto both = [&](__m512 a, __m512 b) { return (__m512)op((F)a, (F)b); };
  __m512 quarter[4];
  for (int i = 0; i < 4; i++) {
    const __m512 a =
        both(_mm512_shuffle_f32x4(row(i), row(i + 4), 0x44), _mm512_shuffle_f32x4(row(i), row(i + 4), 0xEE));
    const __m512 b =
        both(_mm512_shuffle_f32x4(row(i + 8), row(i + 12), 0x44), _mm512_shuffle_f32x4(row(i + 8), row(i + 12), 0xEE));
    quarter[i] = both(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  const __m512 c =
      both(_mm512_shuffle_ps(quarter[0], quarter[1], 0x44), _mm512_shuffle_ps(quarter[0], quarter[1], 0xEE));
  const __m512 d =
      both(_mm512_shuffle_ps(quarter[2], quarter[3], 0x44), _mm512_shuffle_ps(quarter[2], quarter[3], 0xEE));
  store(to, both(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xDD)));
#else
  for (int i = 0; i < kRows; i++) {
    float half[16];
    std::memcpy(half, lanes[i], sizeof half);
    for (int width = 8; width >= kLanes; width /= 2) {
      for (int j = 0; j < width; j += kLanes) store(half + j, op(load<F>(half + j), load<F>(half + j + width)));
    }
    F a = load<F>(half);
    constexpr auto each = std::make_index_sequence<kLanes>();
    if constexpr (kLanes > 4) a = op(a, swapped<4>(a, each));
    a = op(a, swapped<2>(a, each));
    to[i] = op(a, swapped<1>(a, each))[0];
  }
#endif
}

template <int kCount> TIERD_INLINE void load_row(const uint16_t* row, bool is_half, F* v) {
  if (row == nullptr) {
    for (int i = 0; i < kCount; i++) v[i] = F{};
  } else if (is_half) {
    for (int i = 0; i < kCount; i++) v[i] = load_values<true>(row + i * kLanes);
  } else {
    for (int i = 0; i < kCount; i++) v[i] = load_values<false>(row + i * kLanes);
  }
}

// Codes and scales of a batch of rows; rows[i] may be null: zeros. Returns the largest square of a
// row's error as bits: not finite ones are larger than all others.
template <int kDim> uint32_t encode_rows(
    const uint16_t* const* rows, bool is_half, const Levels& levels, const float* signs, Batch<kDim>& to) {
  constexpr int kCount = kDim / kLanes, kParts = 16 / kLanes;
  const float norm = norm_of(kDim);
  for (int r = 0; r < kRows; r++) {
    F v[kCount], square[kParts] = {}, peak[kParts] = {};
    load_row<kCount>(rows[r], is_half, v);
    for (int i = 0; i < kCount; i++) v[i] = v[i] * load<F>(signs + i * kLanes);
    hadamard<kDim>(v);
    for (int i = 0; i < kCount; i++) {
      const F y = v[i] * norm;
      store(to.y[r] + i * kLanes, y);
      square[i % kParts] = i < kParts ? y * y : square[i % kParts] + y * y;
      peak[i % kParts] = most(peak[i % kParts], (F)((I)y & 0x7FFFFFFF));
    }
    for (int i = 0; i < kParts; i++) store(to.lanes[0][r] + i * kLanes, square[i]);
    for (int i = 0; i < kParts; i++) store(to.lanes[1][r] + i * kLanes, peak[i]);
  }
  fold(to.lanes[0], to.square, Add());
  fold(to.lanes[1], to.peak, Most());
  for (int i = 0; i < kRows; i += kLanes) {
    const F mean = root(load<F>(to.square + i) * (1.0f / kDim));
    store(to.step + i, least(mean * levels.high, most(mean * levels.low, load<F>(to.peak + i) * levels.peak)));
  }
  const float low = -static_cast<float>(1 << (levels.bits - 1)), high = -low - 1.0f;
  for (int r = 0; r < kRows; r++) {
    const F inverse = all(1.0f / (to.step[r] < kLeastStep ? 1.0f : to.step[r]));
    F product[kParts] = {}, middles[kParts] = {};
    for (int i = 0; i < kCount; i++) {
      const F y = load<F>(to.y[r] + i * kLanes);
      const I k = rounded(least(all(high), most(all(low), y * inverse - 0.5f)));
      const F middle = floats(k) + 0.5f;
      product[i % kParts] = i < kParts ? y * middle : product[i % kParts] + y * middle;
      middles[i % kParts] = middles[i % kParts] + middle * middle;  // exact in any order
      narrow(to.codes[r] + i * kLanes, k + (1 << (levels.bits - 1)));
    }
    for (int i = 0; i < kParts; i++) store(to.lanes[0][r] + i * kLanes, product[i]);
    for (int i = 0; i < kParts; i++) store(to.lanes[1][r] + i * kLanes, middles[i]);
  }
  fold(to.lanes[0], to.product, Add());
  fold(to.lanes[1], to.middles, Add());
  uint32_t worst = 0;
  for (int i = 0; i < kRows; i += kLanes) {
    const F square = load<F>(to.square + i), product = load<F>(to.product + i);
    const F scale = load<F>(to.step + i) < kLeastStep ? F{} : square / product;
    to_half(to.scales + i, scale);
    const F s = of_half(to.scales + i);
    F off = square - (s + s) * product + s * s * load<F>(to.middles + i);
    off = (off < 0.0f ? F{} : off) + square * kSlack;
    for (int j = 0; j < kLanes; j++) worst = bits_of(off[j]) > worst ? bits_of(off[j]) : worst;
  }
  return worst;
}

// One row's values from its codes, which are below 16 unless kWide. offset: of the code 0 from 0.
template <int kDim, bool kWide> void decode_row(
    const uint8_t* codes, float offset, float scale, const float* signs, bool is_half, uint16_t* to) {
  constexpr int kCount = kDim / kLanes;
  F v[kCount];
#if TIERD_LANES == 16
  const F levels = (F{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - offset) * scale;
#endif
  for (int i = 0; i < kCount; i++) {
    const I code = widened(codes + i * kLanes);
#if TIERD_LANES == 16
    if constexpr (!kWide) {
      v[i] = (F)_mm512_permutexvar_ps((__m512i)code, (__m512)levels);
      continue;
    }
#endif
    v[i] = (floats(code) - offset) * scale;
  }
  hadamard<kDim>(v);
  for (int i = 0; i < kCount; i++) v[i] = v[i] * load<F>(signs + i * kLanes);
  if (is_half) {
    for (int i = 0; i < kCount; i++) store_values<true, true>(to + i * kLanes, v[i]);
  } else {
    for (int i = 0; i < kCount; i++) store_values<false, true>(to + i * kLanes, v[i]);
  }
}

float offset_of(const Levels& levels) { return static_cast<float>(1 << (levels.bits - 1)) - 0.5f; }
