// Codec int8: tierd/codecs/int8.py.

template <bool kHalf> void int8_encode_as(const TierdBlock block, size_t heads, const float* powers, uint8_t* out) {
  // A row's heads that adjoin are one part.
  const size_t parts = block.head == block.dim ? 1 : heads,
               dim = block.head == block.dim ? heads * block.dim : block.dim;
  const size_t row = heads * block.dim, rows = rows_of(block) / heads;
  uint8_t *exponents = out + 4, *codes = exponents + rows;
  uint16_t largest = 0;
  size_t at = 0;
  each_row(block, heads, [&](const uint16_t* from) {
    H top = {};
    for (size_t part = 0; part < parts; part++) {
#pragma GCC unroll 4
      for (size_t i = 0; i < dim; i += kLanes) {
        const H bits = load<H>(from + part * block.head + i) & 0x7FFF;
        top = bits > top ? bits : top;
      }
    }
    uint16_t own = 0;
    for (int i = 0; i < kLanes; i++) own = top[i] > own ? top[i] : own;
    std::memcpy(codes + row * at++, &own, 2);  // a row's codes take this place below
    largest = own > largest ? own : largest;
  });
  const auto least_step = [](uint16_t bits) {
    return (kHalf ? float_of_half(bits) : float_of_bits(static_cast<uint32_t>(bits) << 16)) / 127.0f;
  };
  const float base = least_step(largest) > 1e-30f ? least_step(largest) : 1e-30f;
  float steps[256];
  for (int i = 0; i < 256; i++) steps[i] = base * powers[i];
  std::memcpy(out, &base, 4);
  at = 0;
  each_row(block, heads, [&](const uint16_t* from) {
    uint16_t own;
    std::memcpy(&own, codes + row * at, 2);
    const float needed = least_step(own);
    unsigned exponent = 0;  // the last whose step is large enough
    for (unsigned bit = 128; bit; bit >>= 1) exponent += steps[exponent + bit] >= needed ? bit : 0;
    const float inverse = 1.0f / steps[exponent];
    exponents[at] = static_cast<uint8_t>(exponent);
    uint8_t* to = codes + row * at++;
    for (size_t part = 0; part < parts; part++) {
#pragma GCC unroll 4
      for (size_t i = 0; i < dim; i += kLanes)
        narrow(to + part * dim + i, rounded(load_values<kHalf>(from + part * block.head + i) * inverse));
    }
  });
}

void int8_encode(const TierdBlock& block, size_t heads, const float* powers, uint8_t* out) {
  block.is_half ? int8_encode_as<true>(block, heads, powers, out) : int8_encode_as<false>(block, heads, powers, out);
}

template <bool kHalf, bool kNormal> void int8_decode_as(
    const TierdBlock block, size_t heads, const float* powers, const uint8_t* in) {
  const size_t parts = block.head == block.dim ? 1 : heads,
               dim = block.head == block.dim ? heads * block.dim : block.dim;
  const size_t row = heads * block.dim;
  const uint8_t* exponents = in + 4;
  const int8_t* codes = reinterpret_cast<const int8_t*>(exponents + rows_of(block) / heads);
  float base;
  std::memcpy(&base, in, 4);
  size_t at = 0;
  each_row(block, heads, [&](uint16_t* to) {
    const F step = all(base * powers[exponents[at]]);
    const int8_t* from = codes + row * at++;
    for (size_t part = 0; part < parts; part++) {
#pragma GCC unroll 4
      for (size_t i = 0; i < dim; i += kLanes)
        store_values<kHalf, kNormal>(to + part * block.head + i, floats(widened(from + part * dim + i)) * step);
    }
  });
}

void int8_decode(const TierdBlock& block, size_t heads, const float* powers, const uint8_t* in) {
  float base;
  std::memcpy(&base, in, 4);
  if (block.is_half) return int8_decode_as<true, false>(block, heads, powers, in);
  if (base > 0x1p-100f && base < 0x1p100f) return int8_decode_as<false, true>(block, heads, powers, in);
  int8_decode_as<false, false>(block, heads, powers, in);
}
