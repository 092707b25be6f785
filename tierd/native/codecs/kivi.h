// Codecs kivi-4 and kivi-2: tierd/codecs/kivi.py. A tile has 32 tokens of one head.

constexpr size_t kKiviGroup = 32;

struct Least {
  F operator()(F a, F b) const { return least(a, b); }
};

// The six parts of a tile.
template <class Byte> struct KiviTile {
  Byte *keys, *values, *key_steps, *key_minima, *value_steps, *value_minima;
  KiviTile(Byte* at, size_t dim, size_t bits)
      : keys(at), values(keys + 4 * bits * dim), key_steps(values + 4 * bits * dim), key_minima(key_steps + 2 * dim),
        value_steps(key_minima + 2 * dim), value_minima(value_steps + 2 * dim) {}
  Byte* end(size_t dim) const { return value_minima + 2 * dim; }
};

// Step and minimum of each of kLanes groups.
struct KiviGroups {
  F steps, minima, inverse;
};

KiviGroups kivi_groups(F low, F high, float top, uint16_t* steps, uint16_t* minima) {
  to_half(minima, low + 0.0f);  // never -0
  const F lows = of_half(minima);
  to_half(steps, (most(F{}, high - lows) + 0.0f) * (1.0f / top));
  const F widths = of_half(steps);
  return {widths, lows, widths > 0.0f ? 1.0f / widths : F{}};
}

// Codes of kLanes values. top_error: patterns of the largest errors, in which NaN is the largest.
void kivi_codes(F values, F step, F minimum, F inverse, float top, uint8_t* codes, I* top_error) {
  const I code = rounded(most(F{}, least(all(top), (values - minimum) * inverse)));
  const I error = (I)(values - (floats(code) * step + minimum)) & 0x7FFFFFFF;
  *top_error = error > *top_error ? error : *top_error;
  narrow(codes, code);
}

// A byte has one channel of tokens t, t + n, ...: n is 4 * bits.
template <int kBits> void kivi_pack(const uint8_t* codes, size_t dim, uint8_t* out) {
  const size_t part = 4 * kBits * dim;
  for (size_t i = 0; i < part; i++)
    out[i] = static_cast<uint8_t>(
        kBits == 2 ? codes[i] | codes[i + part] << 2 | codes[i + 2 * part] << 4 | codes[i + 3 * part] << 6
                   : codes[i] | codes[i + part] << 4);
}

template <bool kHalf> void kivi_encode_keys(const uint16_t* from, size_t stride, size_t dim, float top, uint8_t* codes,
    uint8_t* steps, uint8_t* minima, I* top_error) {
  for (size_t i = 0; i < dim; i += kLanes) {
    F low = load_values<kHalf>(from + i), high = low;
    for (size_t token = 1; token < kKiviGroup; token++) {
      const F x = load_values<kHalf>(from + token * stride + i);
      low = least(low, x), high = most(high, x);
    }
    uint16_t half_steps[kLanes], half_minima[kLanes];
    const KiviGroups groups = kivi_groups(low, high, top, half_steps, half_minima);
    std::memcpy(steps + 2 * i, half_steps, sizeof half_steps);
    std::memcpy(minima + 2 * i, half_minima, sizeof half_minima);
    for (size_t token = 0; token < kKiviGroup; token++)
      kivi_codes(load_values<kHalf>(from + token * stride + i), groups.steps, groups.minima, groups.inverse, top,
          codes + token * dim + i, top_error);
  }
}

template <bool kHalf> void kivi_encode_values(const uint16_t* from, size_t stride, size_t dim, float top,
    uint8_t* codes, uint8_t* steps, uint8_t* minima, I* top_error) {
  constexpr size_t kBatch = 16;  // rows that `fold` takes
  alignas(64) float lanes[2][kBatch][16], ends[2][kBatch], groups[3][kBatch];
  uint16_t halves[2][kBatch];
  for (size_t first = 0; first < kKiviGroup; first += kBatch) {
    for (size_t channel = 0; channel < dim; channel += kKiviGroup) {
      const uint16_t* at = from + first * stride + channel;
      for (size_t row = 0; row < kBatch; row++) {
        for (size_t i = 0; i < 16; i += kLanes) {
          const F a = load_values<kHalf>(at + row * stride + i), b = load_values<kHalf>(at + row * stride + i + 16);
          store(lanes[0][row] + i, least(a, b)), store(lanes[1][row] + i, most(a, b));
        }
      }
      fold(lanes[0], ends[0], Least()), fold(lanes[1], ends[1], Most());
      for (size_t i = 0; i < kBatch; i += kLanes) {
        const KiviGroups some =
            kivi_groups(load<F>(ends[0] + i), load<F>(ends[1] + i), top, halves[0] + i, halves[1] + i);
        store(groups[0] + i, some.steps), store(groups[1] + i, some.minima), store(groups[2] + i, some.inverse);
      }
      for (size_t row = 0; row < kBatch; row++) {
        const size_t group = (first + row) * (dim / kKiviGroup) + channel / kKiviGroup;
        std::memcpy(steps + 2 * group, &halves[0][row], 2), std::memcpy(minima + 2 * group, &halves[1][row], 2);
        for (size_t i = 0; i < kKiviGroup; i += kLanes) {
          kivi_codes(load_values<kHalf>(at + row * stride + i), all(groups[0][row]), all(groups[1][row]),
              all(groups[2][row]), top, codes + (first + row) * dim + channel + i, top_error);
        }
      }
    }
  }
}

template <bool kHalf, int kBits> uint64_t kivi_encode_as(const TierdBlock& block, uint8_t* codes, uint8_t* out) {
  constexpr float top = (1 << kBits) - 1;
  I top_error = {};
  for (size_t layer = 0; layer < block.layers; layer++) {
    for (size_t token = 0; token + kKiviGroup <= block.tokens; token += kKiviGroup) {
      for (size_t head = 0; head < block.heads; head++) {
        const KiviTile<uint8_t> tile(out, block.dim, kBits);
        const uint16_t* from = block.raw + layer * block.layer + token * block.token + head * block.head;
        kivi_encode_keys<kHalf>(from, block.token, block.dim, top, codes, tile.key_steps, tile.key_minima, &top_error);
        kivi_pack<kBits>(codes, block.dim, tile.keys);
        kivi_encode_values<kHalf>(
            from + block.pair, block.token, block.dim, top, codes, tile.value_steps, tile.value_minima, &top_error);
        kivi_pack<kBits>(codes, block.dim, tile.values);
        out = tile.end(block.dim);
      }
    }
  }
  int32_t error = 0;
  for (int i = 0; i < kLanes; i++) error = top_error[i] > error ? top_error[i] : error;
  return static_cast<uint64_t>(error);
}

uint64_t kivi_encode(const TierdBlock& block, size_t bits, uint8_t* codes, uint8_t* out) {
  if (bits == 2)
    return block.is_half ? kivi_encode_as<true, 2>(block, codes, out) : kivi_encode_as<false, 2>(block, codes, out);
  return block.is_half ? kivi_encode_as<true, 4>(block, codes, out) : kivi_encode_as<false, 4>(block, codes, out);
}

// Values are 0 or normal in bfloat16: sums of multiples of 2^-24.
template <bool kHalf, int kBits> void kivi_decode_as(const TierdBlock& block, float* scales, const uint8_t* in) {
  constexpr size_t kRowsOfBytes = 4 * kBits;
  const size_t dim = block.dim, groups = dim / kKiviGroup;
  for (size_t layer = 0; layer < block.layers; layer++) {
    for (size_t token = 0; token + kKiviGroup <= block.tokens; token += kKiviGroup) {
      for (size_t head = 0; head < block.heads; head++) {
        const KiviTile<const uint8_t> tile(in, dim, kBits);
        uint16_t* to = block.raw + layer * block.layer + token * block.token + head * block.head;
        for (size_t i = 0; i < 4 * dim; i += kLanes) {
          uint16_t halves[kLanes];
          std::memcpy(halves, tile.key_steps + 2 * i, sizeof halves);
          store(scales + i, of_half(halves));
        }
        for (size_t i = 0; i < dim; i += kLanes) {
          const F step = load<F>(scales + i), minimum = load<F>(scales + dim + i);
          for (size_t row = 0; row < kRowsOfBytes; row++) {
            const I codes = widened(tile.keys + row * dim + i);
            for (size_t k = 0; k < 8 / kBits; k++)
              store_values<kHalf, true>(to + (row + k * kRowsOfBytes) * block.token + i,
                  floats(codes >> static_cast<int>(k * kBits) & ((1 << kBits) - 1)) * step + minimum);
          }
        }
        to += block.pair;
        for (size_t row = 0; row < kRowsOfBytes; row++) {
          for (size_t i = 0; i < dim; i += kLanes) {
            const I codes = widened(tile.values + row * dim + i);
            for (size_t k = 0; k < 8 / kBits; k++) {
              const size_t group = (row + k * kRowsOfBytes) * groups + i / kKiviGroup;
              const F step = all(scales[2 * dim + group]), minimum = all(scales[3 * dim + group]);
              store_values<kHalf, true>(to + (row + k * kRowsOfBytes) * block.token + i,
                  floats(codes >> static_cast<int>(k * kBits) & ((1 << kBits) - 1)) * step + minimum);
            }
          }
        }
        in = tile.end(dim);
      }
    }
  }
}

void kivi_decode(const TierdBlock& block, size_t bits, float* scales, const uint8_t* in) {
  if (bits == 2)
    return block.is_half ? kivi_decode_as<true, 2>(block, scales, in) : kivi_decode_as<false, 2>(block, scales, in);
  block.is_half ? kivi_decode_as<true, 4>(block, scales, in) : kivi_decode_as<false, 4>(block, scales, in);
}
