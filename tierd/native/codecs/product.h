// Products with a basis of bfloat16 on tiles (AMX): tierd/codecs/product.py. Sums are float32.
//
// A tile of the left factor has 16 rows of 32 columns. A tile of the right one has 16 pairs of rows,
// each pair 16 columns of two values. 16 rows or columns are a panel, whose tiles adjoin along the
// sum. Factors have an even number of panels, zeros behind their own rows and columns.

constexpr size_t kSide = 16, kDepth = 32, kTile = kSide * kDepth;
constexpr float kFarthest = 32767;  // as product.py has it

struct TileConfig {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Two panels, and the distance between them.
struct Panels {
  const uint16_t* at;
  size_t next;
};

// 32 rows and 32 columns of the product: sums over `depth` tiles, then over those that `again` names:
// the left factor's follow its others, the right factor's are used once more. soon: what later calls
// read first, 256 bytes per tile.
void product_32(
    Panels left, Panels right, size_t depth, const uint32_t* again, size_t more, const uint16_t* soon, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  // The tile after the next one of a panel. A load of a tile waits long for lines that are not near.
  const auto fetch = [](const uint16_t* tile) {
    for (size_t i = 2 * kTile; i < 3 * kTile; i += 32) __builtin_prefetch(tile + i);
  };
  for (size_t k = 0; k < depth + more; k++, soon += 128) {
    for (size_t i = 0; i < 128; i += 32) __builtin_prefetch(soon + i, 0, 2);
    const uint16_t *a = left.at + k * kTile, *b = right.at + (k < depth ? k : again[k - depth]) * kTile;
    fetch(a);
    fetch(b);
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    fetch(b + right.next);
    _tile_loadd(7, b + right.next, 64);
    _tile_dpbf16ps(1, 4, 7);
    fetch(a + left.next);
    _tile_loadd(5, a + left.next, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 512, 128);
  _tile_stored(3, sums + 528, 128);
}

// Writes the columns of 16 rows as rows.
void store_turned(__m512i* row, uint16_t* to) {
  __m512i other[16];
  for (int i = 0; i < 16; i += 2) {
    other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // row[4 k + i]: column i of each four, of rows 4 k to 4 k + 3
    const __m512i a = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88),
                  b = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xDD),
                  c = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88),
                  d = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xDD);
    _mm512_store_si512(to + 32 * i, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(to + 32 * (i + 4), _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_store_si512(to + 32 * (i + 8), _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_store_si512(to + 32 * (i + 12), _mm512_shuffle_i32x4(b, d, 0xDD));
  }
}

__mmask16 first_lanes(size_t count) { return static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xFFFF); }

size_t padded(size_t count) { return (count + 31) / 32 * 32; }

// Rows of values, rounded to bfloat16, as a right factor: a column of it is a token.
void pack_rows(const TierdProduct& p, const float* rows, uint16_t* to) {
  for (size_t token = 0; token < padded(p.tokens); token += kSide) {
    for (size_t k = 0; k < p.width; k += kDepth, to += kTile) {
      __m512i row[16] = {};
      const size_t left = p.width - k;
      for (size_t i = 0; i < 16 && token + i < p.tokens; i++) {
        const float* from = rows + (token + i) * p.width + k;
        const __m512 low = _mm512_maskz_loadu_ps(first_lanes(left), from),
                     high = _mm512_maskz_loadu_ps(first_lanes(left > 16 ? left - 16 : 0), from + 16);
        row[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      }
      store_turned(row, to);
    }
  }
}

// Multiples as a left factor: a row of it is a token. bfloat16 has 8 bits, so of a multiple beyond 256 a
// tile has the low part alone, -128 to 127. Further tiles, which `again` names, have the rest.
// Returns how many these are. squares: the largest sum of squares of a token in each tile.
size_t pack_multiples(const TierdProduct& p, const int16_t* q, uint16_t* to, uint32_t* again, float* squares) {
  const size_t depth = padded(p.rank) / kDepth, tokens = padded(p.tokens);
  size_t more = 0;
  for (size_t k = 0; k < depth; k++) {
    int far = 0;
    const size_t end = (k + 1) * kDepth < p.rank ? (k + 1) * kDepth : p.rank;
    for (const int16_t* at = q + k * kDepth * p.tokens; at < q + end * p.tokens; at++)
      far |= *at > 256 || *at < -256;
    if (far) again[more++] = static_cast<uint32_t>(k);
  }
  for (size_t k = 0; k < depth; k++) squares[k] = 0;
  for (size_t token = 0; token < tokens; token += kSide, to += (depth + more) * kTile) {
    const __mmask16 own = first_lanes(token < p.tokens ? p.tokens - token : 0);
    for (size_t k = 0, split = 0; k < depth; k++) {
      const bool is_split = split < more && again[split] == k;
      __m512i row[16], high[16];
      __m512 sums = {};
      for (size_t i = 0; i < 16; i++) {
        __m512i low_part[2] = {}, rest[2] = {};
        for (size_t j = 0; j < 2 && k * kDepth + 2 * i + j < p.rank; j++) {
          const int16_t* from = q + (k * kDepth + 2 * i + j) * p.tokens + token;
          const __m512i each = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(own, from));
          const __m512 value = _mm512_cvtepi32_ps(each);
          sums = _mm512_fmadd_ps(value, value, sums);
          low_part[j] = (__m512i)value;
          if (!is_split) continue;
          const __mmask16 far = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(each), _mm512_set1_epi32(256));
          const __m512i low = _mm512_mask_srai_epi32(each, far, _mm512_slli_epi32(each, 24), 24);
          low_part[j] = (__m512i)_mm512_cvtepi32_ps(low);
          rest[j] = (__m512i)_mm512_cvtepi32_ps(_mm512_sub_epi32(each, low));
        }
        row[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(low_part[0], 16), low_part[1]);
        high[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(rest[0], 16), rest[1]);
      }
      store_turned(row, to + k * kTile);
      if (is_split) store_turned(high, to + (depth + split++) * kTile);
      const float most = _mm512_reduce_max_ps(sums);
      squares[k] = most > squares[k] ? most : squares[k];
    }
  }
  return more;
}

// Multiples of the step that are nearest to the coefficients of rows. Returns whether all are within
// kFarthest.
bool product_forward(const TierdProduct& p, const float* rows, uint8_t* scratch, int16_t* q) {
  const TileConfig config;
  alignas(64) float sums[32 * 32];
  const size_t depth = padded(p.width) / kDepth, panel = depth * kTile;
  uint16_t* right = reinterpret_cast<uint16_t*>(scratch);
  pack_rows(p, rows, right);
  __asm__ volatile("" ::: "memory");  // tiles are read behind the compiler's back
  _tile_loadconfig(&config);
  const __m512 inverse = _mm512_set1_ps(p.inverse), limit = _mm512_set1_ps(kFarthest);
  __mmask16 good = 0xFFFF;
  for (size_t i = 0; i < p.rank; i += 32) {
    for (size_t token = 0; token < p.tokens; token += 32) {
      const uint16_t* own = p.tiles + i / kSide * panel;
      product_32({own, panel}, {right + token / kSide * panel, panel}, depth, nullptr, 0,
          own + 2 * panel + token / 32 * depth * 128, sums);
      for (size_t row = 0; row < 32 && i + row < p.rank; row++) {
        for (size_t at = 0; at < 32 && token + at < p.tokens; at += kSide) {
          const __m512 y = _mm512_mul_ps(_mm512_load_ps(sums + 32 * row + at), inverse);
          good &= _mm512_cmp_ps_mask(_mm512_abs_ps(y), limit, _CMP_LE_OQ);
          _mm256_mask_storeu_epi16(q + (i + row) * p.tokens + token + at, first_lanes(p.tokens - token - at),
              _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(y)));
        }
      }
    }
  }
  _tile_release();
  return good == 0xFFFF;
}

// Calls f with each 32 values of each 32 tokens: first value, first token, sums of multiples. Columns of
// all tokens come together. squares: see pack_multiples.
template <class Function> void each_sums(
    const TierdProduct& p, const int16_t* q, uint8_t* scratch, float* squares, Function f) {
  const TileConfig config;
  alignas(64) float sums[32 * 32];
  const size_t depth = padded(p.rank) / kDepth, panel = padded(p.most_rank) / kDepth * kTile;
  uint32_t* again = reinterpret_cast<uint32_t*>(scratch);
  uint16_t* left = reinterpret_cast<uint16_t*>(again + padded(depth));
  const size_t more = pack_multiples(p, q, left, again, squares), own = (depth + more) * kTile;
  __asm__ volatile("" ::: "memory");
  _tile_loadconfig(&config);
  for (size_t i = 0; i < p.width; i += 32) {
    for (size_t token = 0; token < p.tokens; token += 32) {
      const uint16_t* right = p.tiles + i / kSide * panel;
      // The next two panels have 2 * depth tiles: 8 calls fetch them.
      const uint16_t* soon = right + (2 + token / 128 % 2) * panel + token / 32 % 4 * depth * 128;
      product_32({left + token / kSide * own, own}, {right, panel}, depth, again, more, soon, sums);
      f(i, token, sums);
    }
  }
  _tile_release();
}

// The values of multiples.
uint64_t product_values(const TierdProduct& p, const int16_t* q, uint8_t* scratch, float* to, float* squares) {
  const __m512 step = _mm512_set1_ps(p.step);
  each_sums(p, q, scratch, squares, [&](size_t i, size_t token, const float* sums) {
    for (size_t row = 0; row < 32 && token + row < p.tokens; row++) {
      for (size_t at = 0; at < 32 && i + at < p.width; at += kSide)
        _mm512_mask_storeu_ps(to + (token + row) * p.width + i + at, first_lanes(p.width - i - at),
            _mm512_mul_ps(_mm512_load_ps(sums + 32 * row + at), step));
    }
  });
  return 0;
}

// The largest error of the values of multiples, and the largest of rows; then squares.
uint64_t product_errors(const TierdProduct& p, const int16_t* q, uint8_t* scratch, const float* rows, float* found) {
  const __m512 step = _mm512_set1_ps(p.step);
  __m512i worst = {}, top = {};
  each_sums(p, q, scratch, found + 2, [&](size_t i, size_t token, const float* sums) {
    for (size_t row = 0; row < 32 && token + row < p.tokens; row++) {
      for (size_t at = 0; at < 32 && i + at < p.width; at += kSide) {
        const float* from = rows + (token + row) * p.width + i + at;
        const __m512 own = _mm512_maskz_loadu_ps(first_lanes(p.width - i - at), from);
        const __m512 off = _mm512_sub_ps(own, _mm512_mul_ps(_mm512_load_ps(sums + 32 * row + at), step));
        worst = _mm512_max_epu32(worst, (__m512i)_mm512_abs_ps(off));  // NaN is the largest
        top = _mm512_max_epu32(top, (__m512i)_mm512_abs_ps(own));
      }
    }
  });
  found[0] = float_of_bits(_mm512_reduce_max_epu32(worst));
  found[1] = float_of_bits(_mm512_reduce_max_epu32(top));
  return 0;
}

// The values of multiples as those of a block, from value `first` of a token on. A head has a multiple
// of 32 values. One head of all tokens at a time is in `values`: its sums need no memory beyond a cache.
uint64_t product_block(const TierdProduct& p, const int16_t* q, uint8_t* scratch, const TierdBlock& block,
    const TierdTurns& turns, size_t first, float* values, float* squares) {
  const __m512 step = _mm512_set1_ps(p.step);
  each_sums(p, q, scratch, squares, [&](size_t i, size_t token, const float* sums) {
    const size_t channel = i % block.dim, end = token + 32 < p.tokens ? token + 32 : p.tokens;
    for (size_t row = token; row < end; row++, sums += 32) {
      float* to = values + row * block.dim + channel;
      _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_load_ps(sums), step));
      _mm512_storeu_ps(to + kSide, _mm512_mul_ps(_mm512_load_ps(sums + kSide), step));
      if (channel + 32 == block.dim)
        avx512::transform_put(block, turns, avx512::transform_head(block, first + i - channel, row), to - channel);
    }
  });
  return 0;
}
