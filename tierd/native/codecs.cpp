// The codecs' loops. Their plain forms, with the same bytes, are in tierd/codecs; tests compare the
// two.
//
// Each loop is compiled for several instruction sets from one source: `codecs/` is included once per
// set. Values may lie in any order in memory; a head's channels adjoin. No loop reads or writes
// outside of what its arguments name.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses this library's border
#if defined(__x86_64__) && !defined(__clang__)
#define TIERD_X86 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12, of its own immintrin.h
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if TIERD_X86 && __has_include(<amxbf16intrin.h>)
#define TIERD_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define TIERD_INLINE [[gnu::always_inline]] inline
#define TIERD_API extern "C" [[gnu::visibility("default")]]

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little-endian");

// BLOCK of tierd/codecs/loops.py: the values of a block, and distances between them.
struct TierdBlock {
  uint16_t* raw;
  uint64_t layers, tokens, heads, dim, is_half;
  uint64_t layer, pair, token, head;  // distances in values
};

// RANS of tierd/codecs/rans.py: what encoder and decoder know. which: the table of each run.
struct TierdRans {
  const uint8_t* symbols;
  const uint16_t* frequencies;  // [tables, size]
  const uint32_t* which;
  uint64_t count, tables, size, run, lanes;
};

// LOSSLESS of tierd/codecs/lossless.py. order: the group at each place; places: the inverse.
struct TierdLossless {
  TierdBlock block;
  const uint8_t *tops, *chosen;
  const uint32_t *order, *places;
  uint64_t groups, length, by_channel, fraction;
};

// TURNS of tierd/codecs/rows.py. width: of a group.
struct TierdTurns {
  const float *cosine, *sine, *mean;  // [tokens, pairs] twice, [groups * width]
  uint64_t pairs, width;
};

// MULTIPLES of tierd/codecs/multiples.py: [count, tokens].
struct TierdMultiples {
  const uint8_t *tables, *shifts;  // [count]; shifts: at most 16
  const uint8_t* known;            // [tables, 64]: 0, or 255 for symbols that have a frequency
  uint64_t count, tokens;
};

// PRODUCT of tierd/codecs/product.py. tiles: of the basis. step: for values; inverse: for multiples.
struct TierdProduct {
  const uint16_t* tiles;
  uint64_t rank, most_rank, width, tokens;  // most_rank: of the basis
  float step, inverse;
};

namespace {

constexpr size_t kMostLanes = 64;
constexpr float kLeastStep = 1e-20f, kSlack = 5e-6f;  // as rotated.py has them

template <class To, class From> To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "same bits");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
float float_of_bits(uint32_t bits) { return bits_as<float>(bits); }
const float kBfloatMax = float_of_bits(0x7F7F0000);

float float_of_half(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023, sign = static_cast<uint32_t>(half & 0x8000) << 16;
  if (exponent == 0) return float_of_bits(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
  return float_of_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

// Rounded to nearest, ties to even.
uint16_t half_of_float(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7FFFFFFF;
  if (bits > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (bits >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);
  if (bits < 0x38800000)  // below 2^-14: the sum rounds
    return static_cast<uint16_t>(sign | (bits_of(float_of_bits(bits) + 0.5f) - 0x3F000000));
  return static_cast<uint16_t>(sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13);
}

// LEVELS of tierd/codecs/rotated.py, for a number of bits.
struct Levels {
  float peak, low, high;  // the step: peak times the largest, within low and high times the root mean square
  int bits;
};

// TABLES of tierd/codecs/kvquant.py. All but the counts are float32.
struct KvquantTables {
  uint64_t bits, pairs, beyond;  // pairs: of channels that RoPE turns; beyond: outliers on each side of values
  const float *cosine, *sine, *undo;  // [tokens][pairs]; undo: the sine of the opposite angle
  const float *limits, *edges, *levels;  // [layers][2][channels], [layers][2][2^bits - 1], [layers][2][2^bits]
  float* scratch;  // 8 * channels
};

// What an encoder writes. gaps, outliers: of at most so many bytes together.
struct KvquantOut {
  uint8_t *sides, *codes, *gaps, *outliers;
  uint64_t most, gap_count, outlier_count;
  float error, largest_key;
};

size_t rows_of(const TierdBlock& block) { return block.layers * 2 * block.tokens * block.heads; }

// What normalises a Hadamard transform.
float norm_of(int dim) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim))); }

namespace plain {
#define TIERD_LANES 4
#include "codecs/loops.h"
#undef TIERD_LANES
}  // namespace plain

#if TIERD_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,bmi,bmi2,lzcnt,popcnt")
namespace avx2 {
#define TIERD_LANES 8
#include "codecs/loops.h"
#undef TIERD_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512cd,avx512vbmi,avx512vbmi2,avx512bf16,avx2,f16c,fma,bmi,bmi2,lzcnt,popcnt,prefer-vector-width=512")
namespace avx512 {
#define TIERD_LANES 16
#include "codecs/loops.h"
#undef TIERD_LANES
}  // namespace avx512
#pragma GCC pop_options

#if TIERD_AMX
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prefer-vector-width=512,amx-tile,amx-bf16")
namespace amx {
#include "codecs/product.h"
}  // namespace amx
#pragma GCC pop_options
#endif

// Whether this process may use tiles. Linux wants to be asked, and grants it for good (kernel
// documentation, arch/x86/xstate.rst).
bool has_tiles() {
#if TIERD_AMX
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;
  return (d & kBfloat16) && (d & kTiles) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#else
  return false;
#endif
}

int best() {
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt");
  const bool has_512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  const bool has_new = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
      __builtin_cpu_supports("avx512bf16");
  return !has_avx2 ? 0 : !has_512 || !has_new ? 1 : has_tiles() ? 3 : 2;
}
#define TIERD_CALL(call) (level >= 2 ? avx512::call : level == 1 ? avx2::call : plain::call)
#else
int best() { return 0; }
#define TIERD_CALL(call) plain::call
#endif

const int best_level = best();
int level = best_level;

#if TIERD_AMX
#define TIERD_TILES(call) amx::call
#else
#define TIERD_TILES(call) uint64_t{0}
#endif

}  // namespace

// Lets later calls use this instruction set at most: 3 is AVX-512 with tiles (AMX), 2 is AVX-512, 1 is
// AVX2, 0 is what every processor has. Returns the one that they use. For tests and measurements.
TIERD_API uint64_t tierd_use(uint64_t most) {
  level = static_cast<int>(most) < best_level ? static_cast<int>(most) : best_level;
  return static_cast<uint64_t>(level);
}

// The largest pattern without its sign.
TIERD_API uint64_t tierd_largest(const uint16_t* values, uint64_t count) { return TIERD_CALL(largest(values, count)); }

// heads: of a row. powers: float32 [256].
TIERD_API uint64_t tierd_int8_encode(const TierdBlock* block, uint64_t heads, const float* powers, uint8_t* out) {
  TIERD_CALL(int8_encode(*block, heads, powers, out));
  return 0;
}

TIERD_API uint64_t tierd_int8_decode(const TierdBlock* block, uint64_t heads, const float* powers, const uint8_t* in) {
  TIERD_CALL(int8_decode(*block, heads, powers, in));
  return 0;
}

// levels: of keys, then of values; null: codec int3. signs: float32 [dim]. Returns the bits of the largest square of
// an error, as float32.
TIERD_API uint64_t tierd_rotated_encode(
    const TierdBlock* block, const Levels* levels, const float* signs, uint8_t* out) {
  return TIERD_CALL(rotated_encode(*block, levels, signs, out));
}

TIERD_API uint64_t tierd_rotated_decode(
    const TierdBlock* block, const Levels* levels, const float* signs, const uint8_t* in) {
  TIERD_CALL(rotated_decode(*block, levels, signs, in));
  return 0;
}

// entries: uint64 [tables, 256], for its use. Returns the stream's bytes, which end at `end`; all
// bits set for a symbol without a frequency.
TIERD_API uint64_t tierd_rans_encode(const TierdRans* rans, uint64_t* entries, uint8_t* end) {
  return TIERD_CALL(rans_encode(*rans, entries, end));
}

// entries: uint32 [tables, 4096], for its use. words: behind the states. Returns whether the stream is
// complete.
TIERD_API uint64_t tierd_rans_decode(
    const TierdRans* rans, uint32_t* entries, const uint8_t* stream, uint64_t words, uint8_t* symbols) {
  return TIERD_CALL(rans_decode(*rans, entries, stream, words, symbols));
}

TIERD_API uint64_t tierd_lossless_sums(
    const TierdLossless* l, uint8_t* tops, uint32_t* exponents, uint32_t* negatives) {
  TIERD_CALL(lossless_sums(*l, tops, exponents, negatives));
  return 0;
}

// Symbols and counts; then up to `room` escapes. Returns how many escapes there are.
TIERD_API uint64_t tierd_lossless_split(
    const TierdLossless* l, uint8_t* symbols, uint32_t* counts, uint8_t* escapes, uint64_t room) {
  return TIERD_CALL(lossless_split(*l, symbols, counts, escapes, room));
}

TIERD_API uint64_t tierd_lossless_pack(const TierdLossless* l, uint8_t* fractions) {
  TIERD_CALL(pack_fractions(*l, fractions));
  return 0;
}

// Returns whether symbols and escapes are possible.
TIERD_API uint64_t tierd_lossless_join(
    const TierdLossless* l, const uint8_t* symbols, const uint8_t* escapes, uint64_t count, const uint8_t* fractions) {
  TIERD_CALL(unpack_fractions(*l, fractions));
  return TIERD_CALL(lossless_join(*l, symbols, escapes, count));
}

// codes, scales: room for 32 * dim bytes. Returns the bits of the largest error, as float32.
TIERD_API uint64_t tierd_kivi_encode(const TierdBlock* block, uint64_t bits, uint8_t* codes, uint8_t* out) {
  return TIERD_CALL(kivi_encode(*block, bits, codes, out));
}

TIERD_API uint64_t tierd_kivi_decode(const TierdBlock* block, uint64_t bits, float* scales, const uint8_t* in) {
  TIERD_CALL(kivi_decode(*block, bits, scales, in));
  return 0;
}

TIERD_API uint64_t tierd_kvquant_encode(const TierdBlock* block, const KvquantTables* tables, KvquantOut* out) {
  TIERD_CALL(kvquant_encode(*block, *tables, out));
  return 0;
}

// in: limits and codes. places: of the outliers among all values, in order.
TIERD_API uint64_t tierd_kvquant_decode(const TierdBlock* block, const KvquantTables* tables, const uint8_t* in,
    const uint64_t* places, uint64_t count, const uint16_t* outliers) {
  TIERD_CALL(kvquant_decode(*block, *tables, in, places, count, outliers));
  return 0;
}

// rows: float32 [groups, tokens, width].
TIERD_API uint64_t tierd_transform_rows(const TierdBlock* block, const TierdTurns* turns, float* rows) {
  TIERD_CALL(transform_rows(*block, *turns, rows));
  return 0;
}

TIERD_API uint64_t tierd_transform_values(const TierdBlock* block, const TierdTurns* turns, float* rows) {
  TIERD_CALL(transform_values(*block, *turns, rows));
  return 0;
}

TIERD_API uint64_t tierd_transform_split(
    const TierdMultiples* m, const int16_t* q, uint8_t* symbols, uint8_t* low, int16_t* escapes) {
  return TIERD_CALL(transform_split(*m, q, symbols, low, escapes));
}

TIERD_API uint64_t tierd_transform_join(const TierdMultiples* m, const uint8_t* symbols, const uint8_t* low,
    const uint8_t* escapes, uint64_t escape_count, int16_t* q) {
  return TIERD_CALL(transform_join(*m, symbols, low, escapes, escape_count, q));
}

// Whether products use tiles. The functions below are for this case only, and those without a result of their own return 0.
TIERD_API uint64_t tierd_has_tiles() { return level == 3; }

// rows: float32 [tokens, width]. scratch: 2 * width and 64 bytes for each of the tokens, both rounded up
// to 32s. q: [rank, tokens]. Returns whether all multiples are possible.
TIERD_API uint64_t tierd_product_forward(
    [[maybe_unused]] const TierdProduct* product, [[maybe_unused]] const float* rows,
    [[maybe_unused]] uint8_t* scratch, [[maybe_unused]] int16_t* q) {
  return TIERD_TILES(product_forward(*product, rows, scratch, q));
}

// squares, found: see product.h.
TIERD_API uint64_t tierd_product_values(
    [[maybe_unused]] const TierdProduct* product, [[maybe_unused]] const int16_t* q,
    [[maybe_unused]] uint8_t* scratch, [[maybe_unused]] float* to, [[maybe_unused]] float* squares) {
  return TIERD_TILES(product_values(*product, q, scratch, to, squares));
}

TIERD_API uint64_t tierd_product_errors(
    [[maybe_unused]] const TierdProduct* product, [[maybe_unused]] const int16_t* q,
    [[maybe_unused]] uint8_t* scratch, [[maybe_unused]] const float* rows, [[maybe_unused]] float* found) {
  return TIERD_TILES(product_errors(*product, q, scratch, rows, found));
}

TIERD_API uint64_t tierd_product_block(
    [[maybe_unused]] const TierdProduct* product, [[maybe_unused]] const int16_t* q, [[maybe_unused]] uint8_t* scratch,
    [[maybe_unused]] const TierdBlock* block, [[maybe_unused]] const TierdTurns* turns, [[maybe_unused]] uint64_t first,
    [[maybe_unused]] float* values, [[maybe_unused]] float* squares) {
  return TIERD_TILES(product_block(*product, q, scratch, *block, *turns, first, values, squares));
}

// The id of the source of this library.
TIERD_API const char* tierd_source() { return TIERD_SOURCE; }
