// Codec int8: tierd/codecs/int8.py.

// The last step that is at least so large. steps: base * 2^(-i/16), then a negative one. A ratio's bits
// are a logarithm that is too small by at most 1.4 steps.
size_t int8_exponent(const float* steps, float needed) {
  const int guess = static_cast<int>(bits_of(steps[0] / needed) - 0x3F800000) >> 19;
  size_t i = static_cast<size_t>(guess < 1 ? 0 : guess < 255 ? guess - 1 : 254);
#pragma GCC unroll 4
  for (int step = 0; step < 4; step++) i += steps[i + 1] >= needed;
  return i;
}

template <bool kHalf> void int8_encode_as(const TierdBlock block, size_t heads, const float* powers, uint8_t* out) {
  // A row's heads that adjoin are one part.
  const size_t parts = block.head == block.dim ? 1 : heads,
               dim = block.head == block.dim ? heads * block.dim : block.dim;
  const size_t row = heads * block.dim, rows = rows_of(block) / heads;
  uint8_t *exponents = out + 4, *codes = exponents + rows, *tops = codes + (row - 2) * rows;  // codes overwrite tops
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
    const uint16_t own = top_of(top);
    std::memcpy(tops + 2 * at++, &own, 2);
    largest = own > largest ? own : largest;
  });
  const auto least_step = [](uint16_t bits) {
    return (kHalf ? float_of_half(bits) : float_of_bits(static_cast<uint32_t>(bits) << 16)) / 127.0f;
  };
  const float base = least_step(largest) > 1e-30f ? least_step(largest) : 1e-30f;
  float steps[257];
  for (int i = 0; i < 256; i++) steps[i] = base * powers[i];
  steps[256] = -1.0f;
  std::memcpy(out, &base, 4);
  at = 0;
  each_row(block, heads, [&](const uint16_t* from) {
    uint16_t own;
    std::memcpy(&own, tops + 2 * at, 2);
    const size_t exponent = int8_exponent(steps, least_step(own));
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
