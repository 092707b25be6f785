// Interleaved rANS: tierd/codecs/rans.py. AVX-512 does 16 states at a time if each 16 symbols have one
// table; the rest is done one state after the other.

constexpr size_t kWide = 16;  // symbols of one instruction

// The table of each symbol from one place on, forwards or backwards.
struct RunOf {
  const TierdRans& r;
  size_t run, left;  // symbols of this run from the place on
  explicit RunOf(const TierdRans& rans, size_t at) : r(rans), run(at / rans.run), left(rans.run - at % rans.run) {}
  size_t table() const { return r.which[run]; }
  void forward() {
    if (--left == 0) run++, left = r.run;
  }
  void backward() {
    if (left++ == r.run) run--, left = 1;
  }
};

// Entry: start, frequency - 1 from bit 12 on, reciprocal from bit 32 on. A symbol without
// a frequency has 0.
void build_encoder(const TierdRans& r, uint64_t* entries) {
  for (size_t table = 0; table < r.tables; table++) {
    uint64_t start = 0;
    for (size_t symbol = 0; symbol < 256; symbol++) {
      const uint64_t frequency = symbol < r.size ? r.frequencies[table * r.size + symbol] : 0;
      const uint64_t inverse = frequency < 2 ? 0xFFFFFFFF : (uint64_t{1} << 32) / frequency;
      entries[256 * table + symbol] = frequency ? start | (frequency - 1) << 12 | inverse << 32 : 0;
      start += frequency;
    }
  }
}

// Entry: offset within the symbol's slots, frequency - 1 from bit 12 on, symbol from bit 24 on. Tables
// that no run names are not built.
void build_decoder(const TierdRans& r, uint32_t* entries) {
  constexpr uint32_t kNone = ~uint32_t{0};  // no table begins so
  for (size_t table = 0; table < r.tables; table++) entries[table << 12] = kNone;
  for (size_t run = 0; run * r.run < r.count; run++) {
    const size_t table = r.which[run];
    uint32_t* to = entries + (table << 12);
    if (*to != kNone) continue;
    for (size_t symbol = 0; symbol < r.size; symbol++) {
      const uint32_t frequency = r.frequencies[table * r.size + symbol],
                     first = (frequency - 1) << 12 | static_cast<uint32_t>(symbol) << 24;
      for (uint32_t i = 0; i < frequency; i++) to[i] = first | i;
      to += frequency;
    }
  }
}

// Writes the stream so that it ends at `end`. Returns its bytes, or all bits set for a symbol without
// a frequency.
uint64_t rans_encode(const TierdRans r, uint64_t* entries, uint8_t* end) {
  uint32_t states[kMostLanes];
  for (size_t i = 0; i < r.lanes; i++) states[i] = 1 << 16;
  build_encoder(r, entries);
  uint8_t* to = end;
  size_t left = r.count;
  bool is_bad = false;
  const auto one = [&](RunOf& run) {
    const uint64_t entry = entries[256 * run.table() + r.symbols[--left]];
    is_bad |= entry == 0;
    const uint32_t start = entry & 4095, frequency = (entry >> 12 & 4095) + 1;
    uint32_t& x = states[left % r.lanes];
    if (x >> 20 >= frequency) {
      to -= 2;
      store(to, static_cast<uint16_t>(x));
      x >>= 16;
    }
    const uint32_t q = x / frequency;
    x = (q << 12) + (x - q * frequency) + start;
  };
#if TIERD_LANES == 16
  if (r.run % kWide == 0 && r.lanes % kWide == 0) {
    if (left % r.lanes) {
      RunOf run(r, left - 1);
      for (; left % r.lanes; run.backward()) one(run);
    }
    __m512i x[kMostLanes / kWide];
    std::memcpy(x, states, sizeof x);
    const __m512i low = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                  high = _mm512_add_epi32(low, _mm512_set1_epi32(1));
    const __m512i bits12 = _mm512_set1_epi32(4095), ones = _mm512_set1_epi32(1);
    __mmask16 bad = 0;
    size_t run = left ? (left - 1) / r.run : 0, first = run * r.run;
    const uint64_t* table = left ? entries + 256 * r.which[run] : nullptr;
    while (left) {
      left -= r.lanes;
      for (size_t k = r.lanes / kWide; k-- > 0;) {
        const size_t at = left + kWide * k;
        if (at < first) first -= r.run, table = entries + 256 * r.which[--run];
        const __m512i symbols = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(r.symbols + at)));
        const __m512i a = _mm512_i32gather_epi64(_mm512_castsi512_si256(symbols), table, 8);
        const __m512i b = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(symbols, 1), table, 8);
        const __m512i entry = _mm512_permutex2var_epi32(a, low, b), inverse = _mm512_permutex2var_epi32(a, high, b);
        const __m512i frequency = _mm512_add_epi32(_mm512_srli_epi32(entry, 12), ones);
        bad |= _mm512_testn_epi32_mask(inverse, inverse);
        const __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x[k], 20), frequency);
        const unsigned count = static_cast<unsigned>(__builtin_popcount(full));
        to -= 2 * count;
        _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1),
            _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x[k])));
        const __m512i state = _mm512_mask_srli_epi32(x[k], full, x[k], 16);
        const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(state, inverse), 32);
        const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(state, 32), _mm512_srli_epi64(inverse, 32));
        __m512i q = _mm512_mask_blend_epi32(0xAAAA, even, odd);  // the quotient, or 1 less
        __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(q, frequency));
        const __mmask16 more = _mm512_cmpge_epu32_mask(rest, frequency);
        q = _mm512_mask_add_epi32(q, more, q, ones);
        rest = _mm512_mask_sub_epi32(rest, more, rest, frequency);
        x[k] = _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, 12), rest), _mm512_and_si512(entry, bits12));
      }
    }
    std::memcpy(states, x, sizeof x);
    is_bad |= bad != 0;
  }
#endif
  if (left) {
    RunOf run(r, left - 1);
    for (; left; run.backward()) one(run);
  }
  to -= 4 * r.lanes;
  std::memcpy(to, states, 4 * r.lanes);
  return is_bad ? ~uint64_t{0} : static_cast<uint64_t>(end - to);
}

// Returns false if a word is missing.
bool pull(uint32_t& x, const uint8_t*& from, const uint8_t* end) {
  if (x >> 16) return true;
  if (from == end) return false;
  x = x << 16 | load<uint16_t>(from);
  from += 2;
  return true;
}

// Tables of so many symbols are not built: there may be thousands, and two comparisons find a symbol.
constexpr size_t kFew = 3;

// Returns whether no word is missing. Symbols are random, so branches on them would cost the most.
bool decode_few(const TierdRans& r, uint32_t* states, const uint8_t*& from, const uint8_t* end, uint8_t* symbols) {
  RunOf run(r, 0);
  const auto one = [&](size_t at) -> uint32_t& {
    const uint16_t* of = r.frequencies + kFew * run.table();
    uint32_t& x = states[at & (r.lanes - 1)];
    const uint32_t slot = x & 4095, second = of[0], third = second + of[1];
    const uint32_t past = slot >= second, beyond = slot >= third;
    symbols[at] = static_cast<uint8_t>(past + beyond);
    x = of[past + beyond] * (x >> 12) + slot - (second & -past) - (of[1] & -beyond);
    run.forward();
    return x;
  };
  size_t at = 0;
  while (at < r.count && from < end) {
    // A symbol takes one word at most.
    const size_t safe = at + std::min<size_t>(r.count - at, (end - from) / 2);
    for (; at < safe; at++) {
      uint32_t& x = one(at);
      const uint32_t low = x < 1 << 16;
      x = x << 16 * low | (load<uint16_t>(from) & -low);
      from += 2 * low;
    }
  }
  for (; at < r.count; at++)
    if (!pull(one(at), from, end)) return false;
  return true;
}

// Reads `words` words behind the states. Returns whether the stream ends as it must.
uint64_t rans_decode(const TierdRans r, uint32_t* entries, const uint8_t* stream, uint64_t words, uint8_t* symbols) {
  uint32_t states[kMostLanes] = {};
  std::memcpy(states, stream, 4 * r.lanes);
  const uint8_t *from = stream + 4 * r.lanes, *const end = from + 2 * words;
  const auto is_end = [&] {
    bool is = from == end;
    for (size_t i = 0; i < r.lanes; i++) is &= states[i] == 1 << 16;
    return is;
  };
  if (r.size == kFew && r.count) return decode_few(r, states, from, end, symbols) && is_end();
  build_decoder(r, entries);
  size_t at = 0;
#if TIERD_LANES == 16
  if (r.run % kWide == 0 && r.lanes % kWide == 0) {
    __m512i x[kMostLanes / kWide];
    std::memcpy(x, states, sizeof x);
    const __m512i bits12 = _mm512_set1_epi32(4095), least_state = _mm512_set1_epi32(1 << 16);
    size_t run = 0, next_run = r.run;
    const uint32_t* table = r.count ? entries + (size_t{r.which[0]} << 12) : nullptr;
    // A step takes a word per lane at most.
    while (at + r.lanes <= r.count && static_cast<size_t>(end - from) >= 2 * r.lanes) {
      for (size_t k = 0; k < r.lanes / kWide; k++, at += kWide) {
        if (at == next_run) next_run += r.run, table = entries + (size_t{r.which[++run]} << 12);
        const __m512i entry = _mm512_i32gather_epi32(_mm512_and_si512(x[k], bits12), table, 4);
        _mm_storeu_si128((__m128i*)(symbols + at), _mm512_cvtepi32_epi8(_mm512_srli_epi32(entry, 24)));
        const __m512i high = _mm512_srli_epi32(x[k], 12), less = _mm512_and_si512(_mm512_srli_epi32(entry, 12), bits12);
        const __m512i y =
            _mm512_add_epi32(_mm512_mullo_epi32(less, high), _mm512_add_epi32(high, _mm512_and_si512(entry, bits12)));
        const __mmask16 low = _mm512_cmplt_epu32_mask(y, least_state);
        const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
        x[k] = _mm512_mask_or_epi32(y, low, _mm512_slli_epi32(y, 16), _mm512_maskz_expand_epi32(low, next));
        from += 2 * __builtin_popcount(low);
      }
    }
    std::memcpy(states, x, sizeof x);
  }
#endif
  RunOf run(r, at);
  for (; at < r.count; at++, run.forward()) {
    uint32_t& x = states[at % r.lanes];
    const uint32_t entry = entries[(run.table() << 12) + (x & 4095)];
    symbols[at] = static_cast<uint8_t>(entry >> 24);
    x = ((entry >> 12 & 4095) + 1) * (x >> 12) + (entry & 4095);
    if (!pull(x, from, end)) return 0;
  }
  return is_end();
}
