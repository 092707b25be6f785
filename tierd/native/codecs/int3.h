// Codec int3: tierd/codecs/int3.py. 16 chains go from token to token together.

// Levels of a unit normal value: Max (1960), table I. Codes go from the lowest level to the highest.
constexpr float kEdges3[3] = {0.5006f, 1.050f, 1.748f};
alignas(64) constexpr float kLevels3[16] = {
    -2.152f, -1.344f, -0.7560f, -0.2451f, 0.2451f, 0.7560f, 1.344f, 2.152f};

constexpr float kLeastHalf = 0x1p-24f;

template <int kDim> struct Chains {
  const uint16_t* first[kRows];
  alignas(64) float hats[kRows][kDim], weights[kRows], own[kRows];  // own: weights of this token
  alignas(64) float whole[kRows], levels[kRows];  // squares of vectors, and of their levels
};

uint16_t* chain_of(const TierdBlock& b, size_t i) {
  return b.raw + i / (2 * b.heads) * b.layer + i / b.heads % 2 * b.pair + i % b.heads * b.head;
}

I codes_of_3(F z) {
  const F size = (F)((I)z & 0x7FFFFFFF);
  const I steps = (size > kEdges3[0]) + (size > kEdges3[1]) + (size > kEdges3[2]);  // 0 to -3
  return z < 0.0f ? steps + 3 : 4 - steps;
}

template <int kDim> TIERD_INLINE void put_lanes(float* lanes, const F* each) {
  constexpr int kCount = kDim / kLanes, kParts = 16 / kLanes;
  F sum[kParts];
  for (int i = 0; i < kCount; i++) sum[i % kParts] = i < kParts ? each[i] : sum[i % kParts] + each[i];
  for (int i = 0; i < kParts; i++) store(lanes + i * kLanes, sum[i]);
}

// The weights of so many chains, as bytes and floats.
template <int kDim> void weigh(const TierdBlock& block, size_t count, Batch<kDim>& at, Chains<kDim>& to, uint8_t* out) {
  constexpr int kCount = kDim / kLanes;
  for (size_t r = 0; r < count; r++) {
    F both[kCount] = {}, square[kCount] = {}, before[kCount], now[kCount];
    for (size_t token = 1; token < block.tokens; token += 4) {
      load_row<kCount>(to.first[r] + (token - 1) * block.token, block.is_half, before);
      load_row<kCount>(to.first[r] + token * block.token, block.is_half, now);
      for (int i = 0; i < kCount; i++) {
        both[i] = both[i] + now[i] * before[i];
        square[i] = square[i] + before[i] * before[i];
      }
    }
    put_lanes<kDim>(at.lanes[0][r], both), put_lanes<kDim>(at.lanes[1][r], square);
  }
  fold(at.lanes[0], at.product, Add()), fold(at.lanes[1], at.square, Add());
  for (size_t r = 0; r < count; r++) {
    const float share = at.square[r] > 0.0f ? at.product[r] / at.square[r] * 16.0f : 0.0f;
    out[r] = static_cast<uint8_t>(share >= 1.0f ? share < 15.0f ? share : 15.0f : 0.0f);
    to.weights[r] = static_cast<float>(out[r]) / 16.0f;
  }
}

// Codes and scales of one token of each chain. Returns as encode_rows does.
template <int kDim> uint32_t encode_token(
    const TierdBlock& block, size_t token, size_t count, const float* signs, Batch<kDim>& to, Chains<kDim>& chains) {
  constexpr int kCount = kDim / kLanes;
  const float norm = norm_of(kDim);
  for (size_t r = 0; r < count; r++) {
    F v[kCount], rest[kCount];
    load_row<kCount>(chains.first[r] + token * block.token, block.is_half, v);
    for (int i = 0; i < kCount; i++) v[i] = v[i] * load<F>(signs + i * kLanes);
    hadamard<kDim>(v);
    const F weight = all(chains.weights[r]);
    for (int i = 0; i < kCount; i++) {
      v[i] = v[i] * norm;
      store(to.y[r] + i * kLanes, v[i]);
      rest[i] = v[i] - weight * load<F>(chains.hats[r] + i * kLanes);
      v[i] = v[i] * v[i], rest[i] = rest[i] * rest[i];
    }
    put_lanes<kDim>(to.lanes[0][r], rest), put_lanes<kDim>(to.lanes[1][r], v);
  }
  fold(to.lanes[0], to.square, Add()), fold(to.lanes[1], chains.whole, Add());
  for (int i = 0; i < kRows; i += kLanes) {
    const F rest = load<F>(to.square + i), whole = load<F>(chains.whole + i);
    store(chains.own + i, rest < whole ? load<F>(chains.weights + i) : F{});
    store(to.square + i, rest < whole ? rest : whole);
    const F step = root(load<F>(to.square + i) * (1.0f / kDim));
    store(to.step + i, step < kLeastStep ? F{} : step);
  }
  for (size_t r = 0; r < count; r++) {
    const F weight = all(chains.own[r]), inverse = all(1.0f / (to.step[r] > 0.0f ? to.step[r] : 1.0f));
    F product[kCount], levels[kCount];
    for (int i = 0; i < kCount; i++) {
      const F y = load<F>(to.y[r] + i * kLanes), rest = y - weight * load<F>(chains.hats[r] + i * kLanes);
      const I code = codes_of_3(rest * inverse);
      const F level = looked_up(kLevels3, code);
      product[i] = rest * level, levels[i] = level * level;
      narrow(to.codes[r] + i * kLanes, code);
    }
    put_lanes<kDim>(to.lanes[0][r], product), put_lanes<kDim>(to.lanes[1][r], levels);
  }
  fold(to.lanes[0], to.product, Add()), fold(to.lanes[1], chains.levels, Add());
  uint32_t worst = 0;
  for (int i = 0; i < kRows; i += kLanes) {
    const F square = load<F>(to.square + i), product = load<F>(to.product + i);
    const F scale = load<F>(to.step + i) > 0.0f ? square / product : F{};
    to_half(to.scales + i, load<F>(chains.own + i) > 0.0f ? most(all(kLeastHalf), scale) : scale);
    const F s = of_half(to.scales + i);
    store(to.step + i, s);
    F off = square - (s + s) * product + s * s * load<F>(chains.levels + i);
    off = (off < 0.0f ? F{} : off) + load<F>(chains.whole + i) * kSlack;
    for (size_t j = 0; j < kLanes && i + j < count; j++) worst = bits_of(off[j]) > worst ? bits_of(off[j]) : worst;
  }
  for (size_t r = 0; r < count; r++) {
    const F weight = all(chains.own[r]), scale = all(to.step[r]);
    for (int i = 0; i < kCount; i++) {
      const F level = looked_up(kLevels3, widened(to.codes[r] + i * kLanes));
      float* hat = chains.hats[r] + i * kLanes;
      store(hat, weight * load<F>(hat) + level * scale);
    }
    if (chains.own[r] == 0.0f) to.scales[r] |= 0x8000;  // the vector stands alone
  }
  return worst;
}

// Three planes of one bit each, of so many codes: a multiple of 16.
void pack_3(const uint8_t* codes, size_t count, uint8_t* planes, size_t plane) {
  size_t i = 0;
#if TIERD_LANES == 16
  for (; i + 64 <= count; i += 64, planes += 8) {
    const __m512i some = _mm512_loadu_si512(codes + i);
    for (int bit = 0; bit < 3; bit++)
      store(planes + bit * plane, uint64_t{_mm512_test_epi8_mask(some, _mm512_set1_epi8(static_cast<char>(1 << bit)))});
  }
#endif
  for (; i < count; i += 8, planes++) {
    for (int bit = 0; bit < 3; bit++)  // the lowest bits of eight bytes, gathered by a product
      planes[bit * plane] = static_cast<uint8_t>(
          (load<uint64_t>(codes + i) >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56);
  }
}

void unpack_3(const uint8_t* planes, size_t plane, size_t count, uint8_t* codes) {
  size_t i = 0;
#if TIERD_LANES == 16
  for (; i + 64 <= count; i += 64, planes += 8) {
    __m512i some = {};
    for (int bit = 0; bit < 3; bit++)
      some = _mm512_or_si512(
          some, _mm512_maskz_set1_epi8(load<uint64_t>(planes + bit * plane), static_cast<char>(1 << bit)));
    _mm512_storeu_si512(codes + i, some);
  }
#endif
  for (; i < count; i += 8, planes++) {
    uint64_t eight = 0;
    for (int bit = 0; bit < 3; bit++) {  // bit i of the byte to byte i
      const uint64_t each = uint64_t{planes[bit * plane]} * 0x0101010101010101 & 0x8040201008040201;
      eight |= ((each + 0x7F7F7F7F7F7F7F7F) >> 7 & 0x0101010101010101) << bit;
    }
    store(codes + i, eight);
  }
}

// Where the parts of a payload begin.
template <class Byte> struct Parts3 {
  size_t chains, plane;
  Byte *weights, *scales, *planes;
  Parts3(const TierdBlock& block, Byte* at)
      : chains(2 * block.layers * block.heads), plane(chains * block.tokens * block.dim / 8), weights(at),
        scales(at + chains), planes(scales + 2 * chains * block.tokens) {}
  Byte* scales_of(size_t token, size_t chain) const { return scales + 2 * (token * chains + chain); }
  Byte* planes_of(size_t token, size_t chain, size_t dim) const { return planes + (token * chains + chain) * dim / 8; }
};

template <int kDim> uint32_t int3_encode(const TierdBlock block, const float* signs, uint8_t* out) {
  Batch<kDim> batch;
  Chains<kDim> chains;
  const Parts3<uint8_t> to(block, out);
  uint32_t worst = 0;
  for (size_t first = 0; first < to.chains; first += kRows) {
    const size_t count = to.chains - first < kRows ? to.chains - first : kRows;
    std::memset(&batch, 0, sizeof batch);
    std::memset(&chains, 0, sizeof chains);
    for (size_t r = 0; r < count; r++) chains.first[r] = chain_of(block, first + r);
    weigh<kDim>(block, count, batch, chains, to.weights + first);
    for (size_t token = 0; token < block.tokens; token++) {
      const uint32_t off = encode_token<kDim>(block, token, count, signs, batch, chains);
      worst = off > worst ? off : worst;
      std::memcpy(to.scales_of(token, first), batch.scales, 2 * count);
      pack_3(batch.codes[0], count * kDim, to.planes_of(token, first, kDim), to.plane);
    }
  }
  return worst;
}

// signs: normalised. A scale of 0 ends a chain, so that values are 0 or multiples of 2^-100.
template <int kDim> void int3_decode(const TierdBlock block, const float* signs, const uint8_t* in) {
  constexpr int kCount = kDim / kLanes;
  alignas(64) uint8_t codes[kRows][kDim];
  alignas(64) float hats[kRows][kDim];
  const Parts3<const uint8_t> from(block, in);
  for (size_t first = 0; first < from.chains; first += kRows) {
    const size_t count = from.chains - first < kRows ? from.chains - first : kRows;
    uint16_t *to[kRows], halves[kRows] = {};
    float scales[kRows];
    for (size_t r = 0; r < count; r++) to[r] = chain_of(block, first + r);
    std::memset(hats, 0, sizeof hats);
    for (size_t token = 0; token < block.tokens; token++) {
      unpack_3(from.planes_of(token, first, kDim), from.plane, count * kDim, codes[0]);
      std::memcpy(halves, from.scales_of(token, first), 2 * count);
      for (int r = 0; r < kRows; r += kLanes) store(scales + r, (F)((I)of_half(halves + r) & 0x7FFFFFFF));
      for (size_t r = 0; r < count; r++, to[r - 1] += block.token) {
        const F weight = all(halves[r] >> 15 || !halves[r] ? 0.0f : static_cast<float>(from.weights[first + r]) / 16.0f),
                scale = all(scales[r]);
        F v[kCount];
        for (int i = 0; i < kCount; i++) {
          const F level = looked_up(kLevels3, widened(codes[r] + i * kLanes));
          v[i] = weight * load<F>(hats[r] + i * kLanes) + level * scale;
          store(hats[r] + i * kLanes, v[i]);
        }
        hadamard<kDim>(v);
        for (int i = 0; i < kCount; i++) {
          const F value = v[i] * load<F>(signs + i * kLanes);
          block.is_half ? store_values<true, true>(to[r] + i * kLanes, value)
                        : store_values<false, true>(to[r] + i * kLanes, value);
        }
      }
    }
  }
}
