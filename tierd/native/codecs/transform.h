// Codec transform without its products: tierd/codecs/transform.py and multiples.py.

// A head of one token: its first value in the block, and its place among all values of the token.
struct TransformHead {
  uint16_t* raw;
  size_t first, token;
  bool is_key;
};

// first: a multiple of the head_dim.
TransformHead transform_head(const TierdBlock& block, size_t first, size_t token) {
  const size_t index = first / block.dim, head = index % block.heads, pair = index / block.heads % 2,
               layer = index / block.heads / 2;
  return {block.raw + layer * block.layer + pair * block.pair + token * block.token + head * block.head, first, token,
      pair == 0};
}

// RoPE of a key, whose angle is that of turns.
void transform_turn(const TierdBlock& block, const TierdTurns& turns, size_t token, float* values) {
  TierdBlock one = block;
  one.heads = 1;
  const size_t at = token * turns.pairs;
  kvquant_rotate(values, one, turns.cosine + at, turns.sine + at, turns.pairs, values);
}

// Keys and values as rows without their mean; keys as they were before RoPE.
void transform_rows(const TierdBlock& block, const TierdTurns& turns, float* rows) {
  const size_t all_values = 2 * block.layers * block.heads * block.dim;
  for (size_t token = 0; token < block.tokens; token++) {
    for (size_t first = 0; first < all_values; first += block.dim) {
      const TransformHead head = transform_head(block, first, token);
      float* to = rows + (first / turns.width * block.tokens + token) * turns.width + first % turns.width;
      for (size_t i = 0; i < block.dim; i += kLanes)
        store(to + i, block.is_half ? load_values<true>(head.raw + i) : load_values<false>(head.raw + i));
      if (head.is_key) transform_turn(block, turns, token, to);
      for (size_t i = 0; i < block.dim; i += kLanes) store(to + i, load<F>(to + i) - load<F>(turns.mean + first + i));
    }
  }
}

// The inverse for one head. values: become others.
void transform_put(const TierdBlock& block, const TierdTurns& turns, const TransformHead& head, float* values) {
  for (size_t i = 0; i < block.dim; i += kLanes)
    store(values + i, load<F>(values + i) + load<F>(turns.mean + head.first + i));
  if (head.is_key) transform_turn(block, turns, head.token, values);
  for (size_t i = 0; i < block.dim; i += kLanes) {
    if (block.is_half) store_values<true, false>(head.raw + i, load<F>(values + i));
    else store_values<false, false>(head.raw + i, load<F>(values + i));
  }
}

void transform_values(const TierdBlock& block, const TierdTurns& turns, float* rows) {
  const size_t all_values = 2 * block.layers * block.heads * block.dim;
  for (size_t token = 0; token < block.tokens; token++) {
    for (size_t first = 0; first < all_values; first += block.dim)
      transform_put(block, turns, transform_head(block, first, token),
          rows + (first / turns.width * block.tokens + token) * turns.width + first % turns.width);
  }
}

constexpr int kCentre = 31, kFarSymbol = 63;  // as transform_fit.py has them
constexpr size_t kAtOnce = 32;             // multiples; their bits fill a word

// Up to 32 bits from a place on. They lie within `length` bytes.
uint32_t bits_at(const uint8_t* bits, size_t length, size_t place) {
  uint64_t word = 0;
  const size_t left = length - place / 8;
  std::memcpy(&word, bits + place / 8, left < 8 ? left : 8);
  return static_cast<uint32_t>(word >> place % 8);
}

// The place of each plane of low bits. Returns their length in bits.
size_t plane_places(const TierdMultiples& m, size_t* places) {
  size_t counts[16] = {}, total = 0;
  for (size_t i = 0; i < m.count; i++) {
    for (size_t bit = 0; bit < m.shifts[i]; bit++) counts[bit]++;
  }
  for (size_t bit = 0; bit < 16; bit++) places[bit] = total, total += counts[bit] * m.tokens;
  return total;
}

// low: zeros, and 8 bytes more than its bits take. escapes: room for all multiples. Returns how many
// escapes there are.
uint64_t transform_split(
    const TierdMultiples& m, const int16_t* q, uint8_t* symbols, uint8_t* low, int16_t* escapes) {
  size_t places[16];
  plane_places(m, places);
  int16_t* escape = escapes;
  for (size_t i = 0; i < m.count; i++) {
    const uint8_t shift = m.shifts[i], *known = m.known + 64 * m.tables[i];
    for (size_t token = 0; token < m.tokens; token += kAtOnce, q += kAtOnce, symbols += kAtOnce) {
      const size_t own = m.tokens - token < kAtOnce ? m.tokens - token : kAtOnce;
#if TIERD_LANES == 16
      const __mmask32 lanes = ~uint32_t{0} >> (kAtOnce - own);
      const __m512i each = _mm512_maskz_loadu_epi16(lanes, q), high = _mm512_srai_epi16(each, shift);
      const __m512i symbol = _mm512_add_epi16(high, _mm512_set1_epi16(kCentre));
      const __m512i found = _mm512_permutexvar_epi8(symbol, _mm512_loadu_si512(known));
      const __mmask32 far = lanes & (_mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(2 * kCentre)) |
          _mm512_testn_epi16_mask(found, _mm512_set1_epi16(255)));
      _mm256_mask_storeu_epi8(symbols, lanes,
          _mm512_cvtepi16_epi8(_mm512_mask_blend_epi16(far, symbol, _mm512_set1_epi16(kFarSymbol))));
      if (far) {
        const int count = __builtin_popcount(far);
        _mm512_mask_storeu_epi16(
            escape, ~uint32_t{0} >> (kAtOnce - count), _mm512_maskz_compress_epi16(far, high));
        escape += count;
      }
#else
      for (size_t j = 0; j < own; j++) {
        const int high = q[j] >> shift;
        const bool is_near = high >= -kCentre && high <= kCentre && known[high + kCentre];
        symbols[j] = static_cast<uint8_t>(is_near ? high + kCentre : kFarSymbol);
        if (!is_near) *escape++ = static_cast<int16_t>(high);
      }
#endif
      for (unsigned bit = 0; bit < shift; bit++, places[bit - 1] += own) {
        uint8_t* to = low + places[bit] / 8;
        uint64_t word = 0;
#if TIERD_LANES == 16
        word = _mm512_test_epi16_mask(each, _mm512_set1_epi16(static_cast<int16_t>(1 << bit)));
#else
        for (size_t j = 0; j < own; j++) word |= static_cast<uint64_t>(q[j] >> bit & 1) << j;
#endif
        store(to, load<uint64_t>(to) | word << places[bit] % 8);
      }
    }
    q -= (kAtOnce - m.tokens % kAtOnce) % kAtOnce, symbols -= (kAtOnce - m.tokens % kAtOnce) % kAtOnce;
  }
  return static_cast<uint64_t>(escape - escapes);
}

// The inverse. Returns whether symbols and escapes are possible.
uint64_t transform_join(const TierdMultiples& m, const uint8_t* symbols, const uint8_t* low, const uint8_t* escapes,
    uint64_t escape_count, int16_t* q) {
  size_t places[16];
  const size_t length = (plane_places(m, places) + 7) / 8;
  bool is_good = true;
  for (size_t i = 0; i < m.count; i++) {
    const uint8_t shift = m.shifts[i];
    for (size_t token = 0; token < m.tokens; token += kAtOnce, q += kAtOnce, symbols += kAtOnce) {
      const size_t own = m.tokens - token < kAtOnce ? m.tokens - token : kAtOnce;
#if TIERD_LANES == 16
      const __mmask32 lanes = ~uint32_t{0} >> (kAtOnce - own);
      const __m512i symbol = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, symbols));
      const __mmask32 far = _mm512_cmpeq_epi16_mask(symbol, _mm512_set1_epi16(kFarSymbol)) & lanes;
      __m512i high = _mm512_sub_epi16(symbol, _mm512_set1_epi16(kCentre));
      if (far) {
        const size_t count = static_cast<size_t>(__builtin_popcount(far));
        if (count > escape_count) return 0;
        const __m512i next = _mm512_maskz_loadu_epi16(~uint32_t{0} >> (kAtOnce - count), escapes);
        high = _mm512_mask_expand_epi16(high, far, next);
        escapes += 2 * count, escape_count -= count;
      }
      __m512i each = _mm512_slli_epi16(high, shift);
      is_good &= (_mm512_cmpneq_epi16_mask(_mm512_srai_epi16(each, shift), high) & lanes) == 0;
      for (unsigned bit = 0; bit < shift; bit++, places[bit - 1] += own)
        each = _mm512_mask_add_epi16(
            each, bits_at(low, length, places[bit]), each, _mm512_set1_epi16(static_cast<int16_t>(1 << bit)));
      _mm512_mask_storeu_epi16(q, lanes, each);
#else
      uint32_t words[16];
      for (unsigned bit = 0; bit < shift; bit++, places[bit - 1] += own)
        words[bit] = bits_at(low, length, places[bit]);
      for (size_t j = 0; j < own; j++) {
        int each = symbols[j] - kCentre;
        if (symbols[j] == kFarSymbol) {
          if (escape_count-- == 0) return 0;
          each = load<int16_t>(escapes);
          escapes += 2;
        }
        each *= 1 << shift;
        for (unsigned bit = 0; bit < shift; bit++) each |= static_cast<int>(words[bit] >> j & 1) << bit;
        q[j] = static_cast<int16_t>(each);
        is_good &= q[j] == each;
      }
#endif
    }
    q -= (kAtOnce - m.tokens % kAtOnce) % kAtOnce, symbols -= (kAtOnce - m.tokens % kAtOnce) % kAtOnce;
  }
  return is_good && escape_count == 0;
}
