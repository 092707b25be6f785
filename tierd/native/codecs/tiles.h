// The order of rotated codes in a page: tierd/codecs/tiles.py. Then the codec rot.
//
// codes: uint8 [16][kDim], one row per token. Rows r and r + 8 of a block of 16 x 16 go together:
// as two nibbles of a byte, or as two bytes. For values, a block is transposed first.

constexpr int kGroup = 64;  // channels of four adjoining blocks

#if TIERD_LANES == 16
typedef uint8_t Q [[gnu::vector_size(64)]];
Q low_halves(Q a, Q b) { return (Q)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
Q high_halves(Q a, Q b) { return (Q)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
#else
typedef uint8_t Q [[gnu::vector_size(16)]];
Q low_halves(Q a, Q b) { return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
Q high_halves(Q a, Q b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#endif

// Transposes each block of 16 x 16 in place.
template <int kDim> void transpose(uint8_t (*codes)[kDim]) {
  for (int at = 0; at < kDim; at += static_cast<int>(sizeof(Q))) {
    Q rows[16], next[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = load<Q>(codes[i] + at);
#pragma GCC unroll 2
    for (int round = 0; round < 2; round++) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++)
        next[2 * i] = low_halves(rows[i], rows[i + 8]), next[2 * i + 1] = high_halves(rows[i], rows[i + 8]);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++)
        rows[2 * i] = low_halves(next[i], next[i + 8]), rows[2 * i + 1] = high_halves(next[i], next[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) store(codes[i] + at, rows[i]);
  }
}

// Where the bytes of rows r and r + 8 go: 64 channels of both are 64 bytes at 4 bits, 128 at 8 bits.
struct Places {
  uint8_t packed4[64], unpacked4[64];  // the source of each byte
  uint8_t packed8[128], unpacked8[2][64];
};

constexpr Places places() {
  Places p = {};
  for (int lane = 0; lane < 4; lane++) {
    for (int block = 0; block < 4; block++) {
      for (int byte = 0; byte < 4; byte++) {
        const int to = 16 * lane + 4 * block + byte, from = 16 * block + 2 * lane + 8 * (byte % 2) + byte / 2;
        p.packed4[to] = static_cast<uint8_t>(from);
        p.unpacked4[from] = static_cast<uint8_t>(to);
      }
      for (int word = 0; word < 2; word++) {
        for (int byte = 0; byte < 4; byte++) {
          const int to = 32 * lane + 8 * block + 4 * word + byte, from = 16 * block + 2 * lane + 8 * word + byte / 2;
          p.packed8[to] = static_cast<uint8_t>(from + 64 * (byte % 2));
          p.unpacked8[byte % 2][from] = static_cast<uint8_t>(to);
        }
      }
    }
  }
  return p;
}
alignas(64) constexpr Places kPlaces = places();

template <int kDim, int kBits> void pack(const uint8_t (*codes)[kDim], uint8_t* to) {
  for (int at = 0; at < kDim; at += kGroup) {
    for (int r = 0; r < 8; r++, to += 8 * kBits * 2) {
      const uint8_t *a = codes[r] + at, *b = codes[r + 8] + at;
#if TIERD_LANES == 16
      const __m512i low = _mm512_loadu_si512(a), high = _mm512_loadu_si512(b);
      if (kBits == 4) {
        store(to, _mm512_permutexvar_epi8(
            _mm512_load_si512(kPlaces.packed4), _mm512_or_si512(low, _mm512_slli_epi16(high, 4))));
      } else {
        store(to, _mm512_permutex2var_epi8(low, _mm512_load_si512(kPlaces.packed8), high));
        store(to + 64, _mm512_permutex2var_epi8(low, _mm512_load_si512(kPlaces.packed8 + 64), high));
      }
#else
      if (kBits == 4) {
        uint8_t both[kGroup];
        for (int i = 0; i < kGroup; i++) both[i] = static_cast<uint8_t>(a[i] | b[i] << 4);
        for (int i = 0; i < kGroup; i++) to[i] = both[kPlaces.packed4[i]];
      } else {
        uint8_t both[2 * kGroup];
        std::memcpy(both, a, kGroup);
        std::memcpy(both + kGroup, b, kGroup);
        for (int i = 0; i < 2 * kGroup; i++) to[i] = both[kPlaces.packed8[i]];
      }
#endif
    }
  }
}

template <int kDim, int kBits> void unpack(const uint8_t* from, uint8_t (*codes)[kDim]) {
  for (int at = 0; at < kDim; at += kGroup) {
    for (int r = 0; r < 8; r++, from += 8 * kBits * 2) {
      uint8_t *a = codes[r] + at, *b = codes[r + 8] + at;
#if TIERD_LANES == 16
      const __m512i first = _mm512_loadu_si512(from);
      if (kBits == 4) {
        const __m512i both = _mm512_permutexvar_epi8(_mm512_load_si512(kPlaces.unpacked4), first),
                      nibble = _mm512_set1_epi8(15);
        store(a, _mm512_and_si512(both, nibble));
        store(b, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
      } else {
        const __m512i second = _mm512_loadu_si512(from + 64);
        store(a, _mm512_permutex2var_epi8(first, _mm512_load_si512(kPlaces.unpacked8[0]), second));
        store(b, _mm512_permutex2var_epi8(first, _mm512_load_si512(kPlaces.unpacked8[1]), second));
      }
#else
      for (int i = 0; i < kGroup; i++) {
        a[i] = kBits == 4 ? from[kPlaces.unpacked4[i]] & 15 : from[kPlaces.unpacked8[0][i]];
        b[i] = kBits == 4 ? from[kPlaces.unpacked4[i]] >> 4 : from[kPlaces.unpacked8[1][i]];
      }
#endif
    }
  }
}

// A tile's bytes: key codes, value codes, 16 key scales, 16 value scales.
struct Tile {
  const uint8_t *codes[2], *scales[2], *end;
};

template <int kDim> Tile tile_at(const uint8_t* at, const Levels* levels) {
  const uint8_t *values = at + 2 * kDim * levels[0].bits, *scales = values + 2 * kDim * levels[1].bits;
  return {{at, values}, {scales, scales + 2 * kRows}, scales + 4 * kRows};
}

template <int kDim> uint32_t rot_encode(
    const TierdBlock& block, const Levels* levels, const float* signs, uint8_t* out) {
  Batch<kDim> batch;
  uint32_t worst = 0;
  for (size_t i = 0; i < block.layers * block.heads; i++) {
    for (size_t token = 0; token < block.tokens; token += kRows) {
      const Tile tile = tile_at<kDim>(out, levels);
      for (int pair = 0; pair < 2; pair++) {
        const uint16_t* first =
            block.raw + i / block.heads * block.layer + pair * block.pair + i % block.heads * block.head;
        const uint16_t* rows[kRows];
        for (size_t r = 0; r < kRows; r++)
          rows[r] = token + r < block.tokens ? first + (token + r) * block.token : nullptr;
        const uint32_t off = encode_rows<kDim>(rows, block.is_half, levels[pair], signs, batch);
        worst = off > worst ? off : worst;
        if (pair == 1) transpose<kDim>(batch.codes);
        uint8_t* to = out + (tile.codes[pair] - out);
        levels[pair].bits == 4 ? pack<kDim, 4>(batch.codes, to) : pack<kDim, 8>(batch.codes, to);
        std::memcpy(out + (tile.scales[pair] - out), batch.scales, 2 * kRows);
      }
      out += tile.end - out;
    }
  }
  return worst;
}

// signs: normalised.
template <int kDim> void rot_decode(
    const TierdBlock& block, const Levels* levels, const float* signs, const uint8_t* in) {
  alignas(64) uint8_t codes[kRows][kDim];
  float scales[kRows];
  for (size_t i = 0; i < block.layers * block.heads; i++) {
    for (size_t token = 0; token < block.tokens; token += kRows) {
      const Tile tile = tile_at<kDim>(in, levels);
      for (int pair = 0; pair < 2; pair++) {
        const bool is_4 = levels[pair].bits == 4;
        is_4 ? unpack<kDim, 4>(tile.codes[pair], codes) : unpack<kDim, 8>(tile.codes[pair], codes);
        if (pair == 1) transpose<kDim>(codes);
        uint16_t halves[kRows];
        std::memcpy(halves, tile.scales[pair], sizeof halves);
        for (int r = 0; r < kRows; r += kLanes) store(scales + r, of_half(halves + r));
        uint16_t* to = block.raw + i / block.heads * block.layer + pair * block.pair + i % block.heads * block.head +
            token * block.token;
        for (size_t r = 0; r < kRows && token + r < block.tokens; r++, to += block.token) {
          const auto decode = is_4 ? decode_row<kDim, false> : decode_row<kDim, true>;
          decode(codes[r], offset_of(levels[pair]), scales[r], signs, block.is_half, to);
        }
      }
      in = tile.end;
    }
  }
}

// Calls f with the block's head_dim as a constant.
template <class Function> uint32_t with_dim(const TierdBlock& block, Function f) {
  switch (block.dim) {
    case 16: return f(std::integral_constant<int, 16>());
    case 32: return f(std::integral_constant<int, 32>());
    case 64: return f(std::integral_constant<int, 64>());
    case 128: return f(std::integral_constant<int, 128>());
    default: return f(std::integral_constant<int, 256>());
  }
}

uint32_t rotated_encode(const TierdBlock& block, const Levels* levels, const float* signs, uint8_t* out) {
  return with_dim(block, [&](auto dim) {
    if (levels == nullptr) return int3_encode<dim()>(block, signs, out);
    if constexpr (dim() >= kGroup) return rot_encode<dim()>(block, levels, signs, out);
    return ~0u;
  });
}

void rotated_decode(const TierdBlock& block, const Levels* levels, const float* signs, const uint8_t* in) {
  alignas(64) float normalised[256];
  for (size_t i = 0; i < block.dim; i++) normalised[i] = signs[i] * norm_of(static_cast<int>(block.dim));
  with_dim(block, [&](auto dim) {
    if (levels == nullptr) int3_decode<dim()>(block, normalised, in);
    else if constexpr (dim() >= kGroup) rot_decode<dim()>(block, levels, normalised, in);
    return 0u;
  });
}
