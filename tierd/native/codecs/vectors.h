// Vectors of kLanes floats, and the operations on them that differ between processors.
//
// `codecs.cpp` includes this once per instruction set, each time with another TIERD_LANES: 16 is
// AVX-512, 8 is AVX2, 4 is what every processor has. All of them compute the same bits.

constexpr int kLanes = TIERD_LANES;
typedef float F [[gnu::vector_size(4 * kLanes)]];
typedef int32_t I [[gnu::vector_size(4 * kLanes)]];
typedef uint32_t U [[gnu::vector_size(4 * kLanes)]];
typedef uint16_t H [[gnu::vector_size(2 * kLanes)]];
typedef uint8_t B [[gnu::vector_size(kLanes)]];
typedef int8_t S [[gnu::vector_size(kLanes)]];

template <class V, class T> TIERD_INLINE V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T, class V> TIERD_INLINE void store(T* to, V value) { std::memcpy(to, &value, sizeof value); }

F all(float x) { return x - F{}; }

#if TIERD_LANES == 16
F least(F a, F b) { return (F)_mm512_min_ps((__m512)b, (__m512)a); }
F most(F a, F b) { return (F)_mm512_max_ps((__m512)b, (__m512)a); }
F root(F a) { return (F)_mm512_sqrt_ps((__m512)a); }
I rounded(F a) { return (I)_mm512_cvtps_epi32((__m512)a); }
I widened(const uint16_t* from) { return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
I widened(const uint8_t* from) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
I widened(const int8_t* from) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
void narrow(uint16_t* to, I a) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)a)); }
void narrow(uint8_t* to, I a) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)a)); }
F of_half(const uint16_t* from) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
void to_half(uint16_t* to, F a) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)a, 0)); }
#elif TIERD_LANES == 8
F least(F a, F b) { return (F)_mm256_min_ps((__m256)b, (__m256)a); }
F most(F a, F b) { return (F)_mm256_max_ps((__m256)b, (__m256)a); }
F root(F a) { return (F)_mm256_sqrt_ps((__m256)a); }
I rounded(F a) { return (I)_mm256_cvtps_epi32((__m256)a); }
I widened(const uint16_t* from) { return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
I widened(const uint8_t* from) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
I widened(const int8_t* from) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
__m128i words(I a) {
  const __m256i low = _mm256_and_si256((__m256i)a, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
void narrow(uint16_t* to, I a) { _mm_storeu_si128((__m128i*)to, words(a)); }
void narrow(uint8_t* to, I a) {
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(_mm_and_si128(words(a), _mm_set1_epi16(255)), __m128i{}));
}
F of_half(const uint16_t* from) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
void to_half(uint16_t* to, F a) { _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)a, 0)); }
#else
F least(F a, F b) { return b < a ? b : a; }
F most(F a, F b) { return b > a ? b : a; }
F root(F a) {
  for (int i = 0; i < kLanes; i++) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
// To nearest, ties to even, below 2^22: the sum has no bits for fractions.
I rounded(F a) { return (I)(a + 12582912.0f) - 0x4B400000; }
I widened(const uint16_t* from) { return __builtin_convertvector(load<H>(from), I); }
I widened(const uint8_t* from) { return __builtin_convertvector(load<B>(from), I); }
I widened(const int8_t* from) { return __builtin_convertvector(load<S>(from), I); }
void narrow(uint16_t* to, I a) { store(to, __builtin_convertvector(a, H)); }
void narrow(uint8_t* to, I a) { store(to, __builtin_convertvector(a, B)); }
F of_half(const uint16_t* from) {
  F a;
  for (int i = 0; i < kLanes; i++) a[i] = float_of_half(from[i]);
  return a;
}
void to_half(uint16_t* to, F a) {
  for (int i = 0; i < kLanes; i++) to[i] = half_of_float(a[i]);
}
#endif

// The largest lane.
uint16_t top_of(H a) {
#if TIERD_LANES > 4
  __m128i half = (__m128i)__builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (kLanes == 16)
    half = _mm_max_epu16(half, (__m128i)__builtin_shufflevector(a, a, kLanes - 8, kLanes - 7, kLanes - 6, kLanes - 5,
        kLanes - 4, kLanes - 3, kLanes - 2, kLanes - 1));
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)))));
#else
  uint16_t top = 0;
  for (int i = 0; i < kLanes; i++) top = a[i] > top ? a[i] : top;
  return top;
#endif
}

F floats(I a) { return __builtin_convertvector(a, F); }

#if TIERD_LANES == 16
F looked_up(const float* table, I index) { return (F)_mm512_permutexvar_ps((__m512i)index, (__m512)load<F>(table)); }
unsigned lanes_of(I mask) { return _mm512_movepi32_mask((__m512i)mask); }
#elif TIERD_LANES == 8
F looked_up(const float* table, I index) {
  const F low = (F)_mm256_permutevar8x32_ps((__m256)load<F>(table), (__m256i)index),
          high = (F)_mm256_permutevar8x32_ps((__m256)load<F>(table + 8), (__m256i)index);
  return index > 7 ? high : low;
}
unsigned lanes_of(I mask) { return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask)); }
#else
// Items of a table of 16. Indices are below 16.
F looked_up(const float* table, I index) {
  F found = {};
  for (int i = 0; i < kLanes; i++) found[i] = table[index[i]];
  return found;
}
// One bit for each lane that is not 0.
unsigned lanes_of(I mask) {
  unsigned bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= mask[i] ? 1u << i : 0;
  return bits;
}
#endif

// kLanes values of a block as floats.
template <bool kHalf> TIERD_INLINE F load_values(const uint16_t* from) {
  return kHalf ? of_half(from) : (F)(widened(from) << 16);
}

// Rounds floats to nearest, ties to even; those that are too large saturate. kNormal: each is 0 or
// normal, and finite in bfloat16.
template <bool kHalf, bool kNormal> TIERD_INLINE void store_values(uint16_t* to, F a) {
  if (kHalf) return to_half(to, most(all(-65504.0f), least(all(65504.0f), a)));
#if TIERD_LANES == 16
  if (kNormal) return store(to, _mm512_cvtneps_pbh((__m512)a));
#endif
  if (!kNormal) a = most(all(-kBfloatMax), least(all(kBfloatMax), a));
  const U bits = (U)a;
  narrow(to, (I)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
}

// Each lane, and the lane whose number differs in this bit.
template <int kWidth, size_t... i> F swapped(F a, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, a, (i ^ kWidth)...);
}
template <int kWidth, size_t... i> F signs_of(std::index_sequence<i...>) { return F{(i & kWidth ? -1.0f : 1.0f)...}; }

// Sums and differences of the lanes whose numbers differ in this bit.
template <int kWidth> TIERD_INLINE F butterfly(F a) {
  constexpr auto each = std::make_index_sequence<kLanes>();
  const F other = swapped<kWidth>(a, each);
#if TIERD_LANES == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)signs_of<kWidth>(each), (__m512)other);
#else
  return a * signs_of<kWidth>(each) + other;
#endif
}

// Calls f with the first value of each row of `heads` heads: layers, keys and values, tokens, heads.
template <class Function> void each_row(const TierdBlock block, size_t heads, Function f) {
  for (size_t layer = 0; layer < block.layers; layer++) {
    for (size_t pair = 0; pair < 2; pair++) {
      for (size_t token = 0; token < block.tokens; token++) {
        uint16_t* at = block.raw + layer * block.layer + pair * block.pair + token * block.token;
        for (size_t head = 0; head < block.heads; head += heads) f(at + head * block.head);
      }
    }
  }
}

// The largest pattern without its sign of so many values.
uint16_t largest(const uint16_t* values, size_t count) {
  constexpr size_t kStep = 4 * kLanes;
  H top[4] = {};
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int j = 0; j < 4; j++) {
      const H bits = load<H>(values + i + j * kLanes) & 0x7FFF;
      top[j] = bits > top[j] ? bits : top[j];
    }
  }
  uint16_t found = 0;
  for (int j = 0; j < 4; j++) {
    for (int lane = 0; lane < kLanes; lane++) found = top[j][lane] > found ? top[j][lane] : found;
  }
  for (; i < count; i++) found = (values[i] & 0x7FFF) > found ? values[i] & 0x7FFF : found;
  return found;
}
