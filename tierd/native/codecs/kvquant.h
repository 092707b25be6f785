// Codecs kvquant-4, kvquant-3 and kvquant-2: tierd/codecs/kvquant.py. A row has the channels of one
// token of a layer, keys or values.

// turned may be row.
void kvquant_rotate(
    const float* row, const TierdBlock& block, const float* cosine, const float* sine, size_t pairs, float* turned) {
  for (size_t head = 0; head < block.heads; head++, row += block.dim, turned += block.dim) {
    size_t i = 0;
    for (; i + kLanes <= pairs; i += kLanes) {
      const F first = load<F>(row + i), second = load<F>(row + pairs + i), c = load<F>(cosine + i),
              s = load<F>(sine + i);
      store(turned + i, first * c - second * s);
      store(turned + pairs + i, second * c + first * s);
    }
    for (; i < pairs; i++) {
      const float first = row[i], second = row[pairs + i];
      turned[i] = first * cosine[i] - second * sine[i];
      turned[pairs + i] = second * cosine[i] + first * sine[i];
    }
    for (i = 2 * pairs; i < block.dim; i++) turned[i] = row[i];
  }
}

template <bool kUp> F kvquant_further(F a, F b) { return kUp ? most(a, b) : least(a, b); }

template <bool kUp> float kvquant_furthest(F a) {
  constexpr auto each = std::make_index_sequence<kLanes>();
  if constexpr (kLanes > 8) a = kvquant_further<kUp>(a, swapped<8>(a, each));
  if constexpr (kLanes > 4) a = kvquant_further<kUp>(a, swapped<4>(a, each));
  a = kvquant_further<kUp>(a, swapped<2>(a, each));
  return kvquant_further<kUp>(a, swapped<1>(a, each))[0];
}

// The value with `beyond` others below it, or above it if kUp: one pass finds the next value.
template <bool kUp> float kvquant_end(const float* row, size_t channels, size_t beyond) {
  float limit = kUp ? INFINITY : -INFINITY;
  for (size_t seen = 0;;) {
    F found = all(kUp ? -INFINITY : INFINITY);
    I equal = {};
    for (size_t i = 0; i < channels; i += kLanes) {
      const F x = load<F>(row + i);
      equal -= x == all(limit);
      const F next = kvquant_further<kUp>(found, x);
      found = (kUp ? x < all(limit) : x > all(limit)) ? next : found;
    }
    for (int i = 0; i < kLanes; i++) seen += static_cast<size_t>(equal[i]);
    if (seen > beyond) return limit;
    limit = kvquant_furthest<kUp>(found);
    if (seen == beyond) return limit;
  }
}

// 8 codes in kBits bytes.
template <size_t kBits> void kvquant_pack(const uint8_t* codes, size_t channels, uint8_t* out) {
  for (size_t i = 0; i < channels; i += 8, out += kBits) {
    uint64_t word = 0;
#if TIERD_LANES > 4
    word = _pext_u64(load<uint64_t>(codes + i), 0x0101010101010101 * ((1 << kBits) - 1));
#else
    for (size_t j = 0; j < 8; j++) word |= static_cast<uint64_t>(codes[i + j]) << kBits * j;
#endif
    std::memcpy(out, &word, kBits & 6);
    if (kBits == 3) out[2] = static_cast<uint8_t>(word >> 16);
  }
}

template <size_t kBits> void kvquant_unpack(const uint8_t* in, size_t channels, uint8_t* codes) {
  for (size_t i = 0; i < channels; i += 8, in += kBits) {
    std::conditional_t<kBits == 4, uint32_t, uint16_t> low;
    std::memcpy(&low, in, sizeof low);
    const uint64_t word = kBits == 3 ? low | static_cast<uint64_t>(in[2]) << 16 : low;
#if TIERD_LANES > 4
    store(codes + i, static_cast<uint64_t>(_pdep_u64(word, 0x0101010101010101 * ((1 << kBits) - 1))));
#else
    for (size_t j = 0; j < 8; j++) codes[i + j] = static_cast<uint8_t>(word >> kBits * j & ((1 << kBits) - 1));
#endif
  }
}

// The middle and half width of a token's values go through float16.
float kvquant_side(float x, uint8_t* to) {
  const uint16_t half = half_of_float(x);
  std::memcpy(to, &half, 2);
  return float_of_half(half);
}

template <bool kHalf> void kvquant_load(const uint16_t* from, const TierdBlock& block, float* row) {
  for (size_t head = 0; head < block.heads; head++) {
    for (size_t i = 0; i < block.dim; i += kLanes)
      store(row + head * block.dim + i, load_values<kHalf>(from + head * block.head + i));
  }
}

template <bool kHalf, size_t kBits> void kvquant_encode_as(
    const TierdBlock& block, const KvquantTables& tables, KvquantOut* out) {
  constexpr int kLevels = 1 << kBits;
  const size_t channels = block.heads * block.dim;
  float *row = tables.scratch, *flat = row + channels, *decoded = flat + channels, *low = decoded + channels,
        *high = low + channels, *middle = high + channels, *width = middle + channels, *inverse = width + channels;
  uint8_t* codes = reinterpret_cast<uint8_t*>(flat);  // a vector's values are read before its codes are written
  I top_error = {}, top_key = {};
  size_t gap = 0, used = 0;
  for (size_t layer = 0; layer < block.layers; layer++) {
    for (size_t pair = 0; pair < 2; pair++) {
      float edges[16] = {}, levels[16] = {};
      std::memcpy(edges, tables.edges + (2 * layer + pair) * (kLevels - 1), 4 * (kLevels - 1));
      std::memcpy(levels, tables.levels + (2 * layer + pair) * kLevels, 4 * kLevels);
      for (size_t token = 0; token < block.tokens; token++) {
        kvquant_load<kHalf>(block.raw + layer * block.layer + pair * block.pair + token * block.token, block, row);
        if (pair == 0) {
          kvquant_rotate(
              row, block, tables.cosine + token * tables.pairs, tables.undo + token * tables.pairs, tables.pairs, flat);
          if (token == 0) {
            for (size_t i = 0; i < channels; i++) {
              middle[i] = tables.limits[2 * layer * channels + i],
                  width[i] = tables.limits[(2 * layer + 1) * channels + i];
              low[i] = middle[i] - width[i], high[i] = middle[i] + width[i],
                  inverse[i] = width[i] > 0.0f ? 1.0f / width[i] : 0.0f;
            }
          }
          for (size_t i = 0; i < channels; i += kLanes) {
            const I key = (I)load<F>(flat + i) & 0x7FFFFFFF;
            top_key = key > top_key ? key : top_key;
          }
        } else {
          std::memcpy(flat, row, 4 * channels);
          const float least_one = kvquant_end<false>(row, channels, tables.beyond) + 0.0f,
                      most_one = kvquant_end<true>(row, channels, tables.beyond) + 0.0f;
          const float center = kvquant_side((least_one + most_one) * 0.5f, out->sides),
                      half = kvquant_side((most_one - least_one) * 0.5f, out->sides + 2),
                      one = half > 0.0f ? 1.0f / half : 0.0f;
          out->sides += 4;
          for (size_t i = 0; i < channels; i++)
            low[i] = least_one, high[i] = most_one, middle[i] = center, width[i] = half, inverse[i] = one;
        }
        for (size_t i = 0; i < channels; i += kLanes) {
          const F x = load<F>(flat + i), z = (x - load<F>(middle + i)) * load<F>(inverse + i);
          I code = {};
#pragma GCC unroll 4
          for (int bit = kLevels / 2; bit; bit /= 2) code += (z > looked_up(edges, code + (bit - 1))) & bit;
          store(decoded + i, looked_up(levels, code) * load<F>(width + i) + load<F>(middle + i));
          narrow(codes + i, code);
          unsigned lanes = lanes_of((x < load<F>(low + i)) | (x > load<F>(high + i)));
          size_t after = 0;  // lanes of this vector that the gap has
          for (; lanes; lanes &= lanes - 1) {
            const size_t lane = static_cast<size_t>(__builtin_ctz(lanes));
            gap += lane - after, after = lane + 1;
            used += gap / 255 + 3;
            if (used > out->most) return void(out->error = INFINITY);
            for (; gap >= 255; gap -= 255) *out->gaps++ = 255, out->gap_count++;
            *out->gaps++ = static_cast<uint8_t>(gap), out->gap_count++;
            decoded[i + lane] = kvquant_side(x[lane], out->outliers);
            out->outliers += 2, out->outlier_count++;
            gap = 0;
          }
          gap += kLanes - after;
        }
        kvquant_pack<kBits>(codes, channels, out->codes);
        out->codes += kBits * channels / 8;
        if (pair == 0)
          kvquant_rotate(decoded, block, tables.cosine + token * tables.pairs, tables.sine + token * tables.pairs,
              tables.pairs, decoded);
        for (size_t i = 0; i < channels; i += kLanes) {
          const I error = (I)(load<F>(decoded + i) - load<F>(row + i)) & 0x7FFFFFFF;
          top_error = error > top_error ? error : top_error;
        }
      }
    }
  }
  int32_t error = 0, key = 0;
  for (int i = 0; i < kLanes; i++)
    error = top_error[i] > error ? top_error[i] : error, key = top_key[i] > key ? top_key[i] : key;
  out->error = float_of_bits(static_cast<uint32_t>(error)),
      out->largest_key = float_of_bits(static_cast<uint32_t>(key));
}

template <size_t kBits> void kvquant_encode_bits(
    const TierdBlock& block, const KvquantTables& tables, KvquantOut* out) {
  block.is_half ? kvquant_encode_as<true, kBits>(block, tables, out)
                : kvquant_encode_as<false, kBits>(block, tables, out);
}

void kvquant_encode(const TierdBlock& block, const KvquantTables& tables, KvquantOut* out) {
  tables.bits == 4       ? kvquant_encode_bits<4>(block, tables, out)
      : tables.bits == 3 ? kvquant_encode_bits<3>(block, tables, out)
                         : kvquant_encode_bits<2>(block, tables, out);
}

template <bool kHalf, size_t kBits> void kvquant_decode_as(const TierdBlock& block, const KvquantTables& tables,
    const uint8_t* sides, const uint64_t* places, size_t count, const uint16_t* outliers) {
  constexpr int kLevels = 1 << kBits;
  const size_t channels = block.heads * block.dim;
  const uint8_t* in = sides + 4 * block.layers * block.tokens;
  float* decoded = tables.scratch;
  uint8_t* codes = reinterpret_cast<uint8_t*>(decoded + channels);
  size_t at = 0, begun = 0;
  for (size_t layer = 0; layer < block.layers; layer++) {
    for (size_t pair = 0; pair < 2; pair++) {
      float levels[16] = {};
      std::memcpy(levels, tables.levels + (2 * layer + pair) * kLevels, 4 * kLevels);
      const float *middle = tables.limits + 2 * layer * channels, *width = middle + channels;
      for (size_t token = 0; token < block.tokens; token++, begun += channels, in += kBits * channels / 8) {
        kvquant_unpack<kBits>(in, channels, codes);
        uint16_t halves[2] = {};
        if (pair) {
          std::memcpy(halves, sides, 4);
          sides += 4;
        }
        const F center = all(float_of_half(halves[0])), half = all(float_of_half(halves[1]));
        for (size_t i = 0; i < channels; i += kLanes) {
          const F level = looked_up(levels, widened(codes + i));
          store(decoded + i, pair ? level * half + center : level * load<F>(width + i) + load<F>(middle + i));
        }
        for (; at < count && places[at] < begun + channels; at++)
          decoded[places[at] - begun] = float_of_half(outliers[at]);
        if (pair == 0)
          kvquant_rotate(decoded, block, tables.cosine + token * tables.pairs, tables.sine + token * tables.pairs,
              tables.pairs, decoded);
        uint16_t* to = block.raw + layer * block.layer + pair * block.pair + token * block.token;
        for (size_t head = 0; head < block.heads; head++) {
          for (size_t i = 0; i < block.dim; i += kLanes)
            store_values<kHalf, false>(to + head * block.head + i, load<F>(decoded + head * block.dim + i));
        }
      }
    }
  }
}

template <size_t kBits> void kvquant_decode_bits(const TierdBlock& block, const KvquantTables& tables,
    const uint8_t* sides, const uint64_t* places, size_t count, const uint16_t* outliers) {
  block.is_half ? kvquant_decode_as<true, kBits>(block, tables, sides, places, count, outliers)
                : kvquant_decode_as<false, kBits>(block, tables, sides, places, count, outliers);
}

void kvquant_decode(const TierdBlock& block, const KvquantTables& tables, const uint8_t* sides, const uint64_t* places,
    size_t count, const uint16_t* outliers) {
  if (tables.bits == 4) return kvquant_decode_bits<4>(block, tables, sides, places, count, outliers);
  if (tables.bits == 3) return kvquant_decode_bits<3>(block, tables, sides, places, count, outliers);
  kvquant_decode_bits<2>(block, tables, sides, places, count, outliers);
}
