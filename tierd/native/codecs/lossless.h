// Codec lossless: tierd/codecs/lossless.py. Groups are channels, or heads.

typedef uint16_t H16 [[gnu::vector_size(32)]];
typedef uint8_t B16 [[gnu::vector_size(16)]];

constexpr int kEscape = 127;

TIERD_INLINE H16 every(int x) {
  H16 all;
  for (int i = 0; i < 16; i++) all[i] = static_cast<uint16_t>(x);
  return all;
}

// Calls f with the first value and the first group of each head of each layer's keys and values.
template <class Function> void each_head(const TierdLossless& l, Function f) {
  const TierdBlock& b = l.block;
  size_t group = 0;
  for (size_t i = 0; i < 2 * b.layers; i++) {
    for (size_t head = 0; head < b.heads; head++, group += l.by_channel ? b.dim : 1)
      f(b.raw + i / 2 * b.layer + i % 2 * b.pair + head * b.head, group);
  }
}

// Sums over each group: largest exponents, sums of exponents, negative values.
void lossless_sums(const TierdLossless& l, uint8_t* tops, uint32_t* exponents, uint32_t* negatives) {
  const TierdBlock b = l.block;
  const int fraction = static_cast<int>(l.fraction);
  each_head(l, [&](const uint16_t* first, size_t group) {
    if (!l.by_channel) tops[group] = 0, exponents[group] = 0, negatives[group] = 0;
    for (size_t channel = 0; channel < b.dim; channel += kLanes) {
      H top = {};
      uint32_t sum[kLanes] = {}, negative[kLanes] = {};
      for (size_t token = 0; token < b.tokens;) {
        const size_t end = token + 256 < b.tokens ? token + 256 : b.tokens;  // sums of 256 exponents fit 16 bits
        H some = {}, signs = {};
        for (; token < end; token++) {
          const H bits = load<H>(first + token * b.token + channel), exponent = (bits & 0x7FFF) >> fraction;
          top = exponent > top ? exponent : top;
          some += exponent;
          signs += bits >> 15;
        }
        for (int i = 0; i < kLanes; i++) sum[i] += some[i], negative[i] += signs[i];
      }
      for (int i = 0; i < kLanes; i++) {
        const size_t own = l.by_channel ? group + channel + static_cast<size_t>(i) : group;
        const uint8_t largest = static_cast<uint8_t>(top[i]);
        tops[own] = l.by_channel || largest > tops[own] ? largest : tops[own];
        exponents[own] = (l.by_channel ? 0 : exponents[own]) + sum[i];
        negatives[own] = (l.by_channel ? 0 : negatives[own]) + negative[i];
      }
    }
  });
}

// Transposes 16 x 16 bytes.
TIERD_INLINE void turn(B16* rows) {
  B16 next[16];
#pragma GCC unroll 4
  for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      next[2 * i] =
          __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] =
          __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = next[i];
  }
}

// Eight fractions to or from so many bytes. Values of a block have no gaps in memory.
void pack_fractions(const TierdLossless& l, uint8_t* to) {
  const size_t count = rows_of(l.block) * l.block.dim, bits = l.fraction;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (size_t i = 0; i < count; i += 8, to += bits) {
    for (size_t half = 0; half < 2; half++) {
      const uint64_t four = load<uint64_t>(l.block.raw + i + 4 * half);
#if TIERD_LANES > 4
      const uint64_t packed = _pext_u64(four, mask * 0x0001000100010001);
#else
      const uint64_t packed = (four & mask) | (four >> 16 & mask) << bits | (four >> 32 & mask) << 2 * bits |
          (four >> 48 & mask) << 3 * bits;
#endif
      if (bits == 10) std::memcpy(to + 5 * half, &packed, 5);
      else if (half == 0) std::memcpy(to, &packed, 4);
      else store(to + 3, static_cast<uint32_t>(packed << 4 | to[3]));
    }
  }
}

void unpack_fractions(const TierdLossless& l, const uint8_t* from) {
  const size_t count = rows_of(l.block) * l.block.dim, bits = l.fraction;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  for (size_t i = 0; i < count; i += 8, from += bits) {
    for (size_t half = 0; half < 2; half++) {
      uint64_t packed = 0;
      if (bits == 10) std::memcpy(&packed, from + 5 * half, 5);
      else packed = half == 0 ? load<uint32_t>(from) : load<uint32_t>(from + 3) >> 4;
#if TIERD_LANES > 4
      const uint64_t four = _pdep_u64(packed, mask * 0x0001000100010001);
#else
      const uint64_t four = (packed & mask) | (packed >> bits & mask) << 16 | (packed >> 2 * bits & mask) << 32 |
          (packed >> 3 * bits & mask) << 48;
#endif
      store(l.block.raw + i + 4 * half, four);
    }
  }
}

// The value of a group's symbol.
uint16_t* value_of(const TierdLossless& l, size_t group, size_t symbol) {
  const TierdBlock& b = l.block;
  const size_t head = l.by_channel ? group / b.dim : group;
  uint16_t* first = b.raw + head / b.heads / 2 * b.layer + head / b.heads % 2 * b.pair + head % b.heads * b.head;
  return l.by_channel ? first + group % b.dim + symbol * b.token : first + symbol / b.dim * b.token + symbol % b.dim;
}

// Calls f(group, symbol) for each escape, in the order of the symbols.
template <class Function> void each_escape(const TierdLossless& l, const uint8_t* symbols, Function f) {
  for (size_t place = 0; place < l.groups; place++) {
    const uint8_t* row = symbols + place * l.length;
    for (size_t i = 0; i < l.length; i += kLanes) {
      const size_t count = l.length - i < kLanes ? l.length - i : kLanes;
      uint8_t most = 0;
      for (size_t j = 0; j < count; j++) most = row[i + j] > most ? row[i + j] : most;
      if (most < 2 * kEscape) continue;
      for (size_t j = 0; j < count; j++) {
        if (row[i + j] >= 2 * kEscape) f(l.order[place], i + j);
      }
    }
  }
}

// Symbols of all groups, by their places, and how often each occurs in each table: uint32 [tables, 256].
// Returns the number of escapes, of at most as many as there is room for.
uint64_t lossless_split(const TierdLossless& l, uint8_t* symbols, uint32_t* counts, uint8_t* escapes, uint64_t room) {
  const TierdBlock b = l.block;
  const int fraction = static_cast<int>(l.fraction);
  const H16 escape = every(kEscape);
  const auto symbols_of = [&](const uint16_t* from, H16 top, H16 sign) __attribute__((always_inline)) {
    const H16 bits = load<H16>(from), far = top - ((bits & 0x7FFF) >> fraction);
    const H16 symbol = (far < escape ? far : escape) * 2 + (bits >> 15 ^ sign);
    B16 bytes = __builtin_convertvector(symbol, B16);
    return bytes;
  };
  each_head(l, [&](const uint16_t* first, size_t group) {
    for (size_t channel = 0; channel < b.dim; channel += 16) {
      H16 top = {}, sign = {};
      uint8_t* rows[16];
      for (size_t i = 0; i < 16; i++) {
        const size_t own = l.by_channel ? group + channel + i : group;
        top[i] = l.tops[own], sign[i] = l.chosen[own] >> 7;
        rows[i] = symbols + l.places[own] * l.length;
      }
      if (!l.by_channel) {
        for (size_t token = 0; token < b.tokens; token++)
          store(rows[0] + token * b.dim + channel, symbols_of(first + token * b.token + channel, top, sign));
        continue;
      }
      for (size_t token = 0; token < b.tokens; token += 16) {
        const size_t count = b.tokens - token < 16 ? b.tokens - token : 16;
        B16 tile[16] = {};
        for (size_t i = 0; i < count; i++) tile[i] = symbols_of(first + (token + i) * b.token + channel, top, sign);
        turn(tile);
        if (count == 16) {
          for (int i = 0; i < 16; i++) store(rows[i] + token, tile[i]);
        } else {
          for (int i = 0; i < 16; i++) std::memcpy(rows[i] + token, &tile[i], count);
        }
      }
    }
  });
  size_t place = 0, found = 0;
  while (place < l.groups) {  // four counts at a time: equal neighbours do not wait for each other
    const unsigned table = l.chosen[l.order[place]] & 15;
    uint32_t part[4][256] = {};
    size_t next = place;
    while (next < l.groups && (l.chosen[l.order[next]] & 15) == table) next++;
    const uint8_t *row = symbols + place * l.length, *end = symbols + next * l.length;
    for (; row + 8 <= end; row += 8) {
      const uint64_t eight = load<uint64_t>(row);
      for (int i = 0; i < 8; i++) part[i % 4][eight >> 8 * i & 255]++;
    }
    for (; row < end; row++) part[0][*row]++;
    for (int i = 0; i < 256; i++) counts[256 * table + i] = part[0][i] + part[1][i] + part[2][i] + part[3][i];
    found += counts[256 * table + 2 * kEscape] + counts[256 * table + 2 * kEscape + 1];
    place = next;
  }
  if (found == 0 || found > room) return found;
  each_escape(l, symbols, [&](size_t group, size_t symbol) {
    *escapes++ = static_cast<uint8_t>((*value_of(l, group, symbol) & 0x7FFF) >> fraction);
  });
  return found;
}

// Values from symbols; the fractions are there. Returns whether the exponents are possible and the
// escapes as many as the symbols name.
uint64_t lossless_join(const TierdLossless& l, const uint8_t* symbols, const uint8_t* escapes, uint64_t count) {
  const TierdBlock b = l.block;
  const int fraction = static_cast<int>(l.fraction);
  H16 bad = {};
  const H16 most_exponent = every(0x7FFF >> fraction);
  const H16 escape = every(kEscape);
  const H16 without_sign = every(0x7FFF), one = every(1);
  const auto put = [&](uint16_t* to, B16 bytes, H16 top, H16 sign) __attribute__((always_inline)) {
    const H16 symbol = __builtin_convertvector(bytes, H16), far = symbol >> 1, exponent = top - far;
    const H16 is_escaped = (H16)(far == escape);
    bad |= (H16)(exponent > most_exponent) & ~is_escaped;  // less than 0 wraps
    store(to, load<H16>(to) | ((exponent << fraction) & without_sign & ~is_escaped) | ((symbol & one) ^ sign) << 15);
  };
  each_head(l, [&](uint16_t* first, size_t group) {
    for (size_t channel = 0; channel < b.dim; channel += 16) {
      H16 top = {}, sign = {};
      const uint8_t* rows[16];
      for (size_t i = 0; i < 16; i++) {
        const size_t own = l.by_channel ? group + channel + i : group;
        top[i] = l.tops[own], sign[i] = l.chosen[own] >> 7;
        rows[i] = symbols + l.places[own] * l.length;
      }
      if (!l.by_channel) {
        for (size_t token = 0; token < b.tokens; token++)
          put(first + token * b.token + channel, load<B16>(rows[0] + token * b.dim + channel), top, sign);
        continue;
      }
      for (size_t token = 0; token < b.tokens; token += 16) {
        const size_t part = b.tokens - token < 16 ? b.tokens - token : 16;
        B16 tile[16] = {};
        for (int i = 0; i < 16; i++) {
          if (part == 16) tile[i] = load<B16>(rows[i] + token);
          else std::memcpy(&tile[i], rows[i] + token, part);
        }
        turn(tile);
        for (size_t i = 0; i < part; i++) put(first + (token + i) * b.token + channel, tile[i], top, sign);
      }
    }
  });
  size_t found = 0;
  bool is_good = true;
  each_escape(l, symbols, [&](size_t group, size_t symbol) {
    if (found++ >= count) return;
    const uint16_t exponent = *escapes++;
    is_good &= exponent <= 0x7FFF >> fraction;
    uint16_t* to = value_of(l, group, symbol);
    *to = static_cast<uint16_t>(*to | (exponent << fraction & 0x7FFF));
  });
  for (int i = 0; i < 16; i++) is_good &= bad[i] == 0;
  return is_good && found == count;
}
