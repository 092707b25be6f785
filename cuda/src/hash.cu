// Checksums of slices: XXH3-64 with the default secret and seed 0, for any length and address,
// equal to the bit to the daemon's sums on the host.
//
// XXH3 is Yann Collet's. This follows "xxHash fast digest algorithm" (doc/xxhash_spec.md of
// github.com/Cyan4973/xxHash), with its words: a stripe is 64 bytes, a block 16 stripes. A block's
// additions to the eight accumulators do not depend on them: lanes gather them in any order,
// several blocks at a time. Only the scramble behind each block is sequential.
#include "../include/simt.h"

namespace tierd {

struct SumsParams {
  const uint64_t* addresses;  // [slices]; an empty slice is not read, others only in the granules of 16 bytes that they touch
  const uint32_t* lengths;    // [slices], bytes
  uint64_t* sums;             // [slices]
};

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9, kPrimeMx2 = 0x9FB21C651E98DF25;

static __device__ const uint64_t kSecret[24] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82,
    0x8E2443F7744608B8, 0x4C263A81E69035E0, 0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8, 0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5,
    0x49DAF0B751DD0D17, 0x9E68D429265516D3, 0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};
static __device__ const uint64_t kBegin[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

constexpr uint32_t kStripeBytes = 64, kBlockBytes = 1024;
constexpr int kStripeLanes = 4, kHalves = 2;  // a lane has 16 bytes of a stripe, a warp half a block at a time
constexpr int kAhead = 4;                     // blocks in flight while others are summed

// Two words of 8 bytes: a lane's load, and the two accumulators that it feeds.
struct Pair {
  uint64_t words[2];
};

SIMT_DEV uint64_t shifted(uint64_t low, uint64_t high, int bits) { return low >> bits | high << 1 << (63 - bits); }

// One word or two of the secret, from any byte on.
SIMT_DEV uint64_t secret_at(int offset) { return shifted(kSecret[offset / 8], kSecret[offset / 8 + 1], offset % 8 * 8); }
SIMT_DEV Pair secrets_at(int offset) { return {secret_at(offset), secret_at(offset + 8)}; }

// -- bytes

// 16 bytes in flight, as granules of 16: one if they are aligned, else the two that contain them.
// They are combined at their use: to combine them at the load would wait for it.
template <bool kIsAligned> struct Arriving {
  uint4 granules[kIsAligned ? 1 : 2];

  SIMT_DEV void load(const unsigned char* granule) {
    granules[0] = *reinterpret_cast<const uint4*>(granule);
    if constexpr (!kIsAligned) granules[1] = *reinterpret_cast<const uint4*>(granule + 16);
  }
  // offset: of the bytes in the first granule.
  SIMT_DEV Pair arrived(int offset) const {
    const Pair here = words_of(granules[0]);
    if constexpr (kIsAligned) return here;
    const auto [a, b] = here.words;
    const auto [c, d] = words_of(granules[kIsAligned ? 0 : 1]).words;
    const int bits = offset % 8 * 8;
    return offset < 8 ? Pair{shifted(a, b, bits), shifted(b, c, bits)} : Pair{shifted(b, c, bits), shifted(c, d, bits)};
  }

 private:
  static SIMT_DEV Pair words_of(uint4 x) { return {x.x | (uint64_t)x.y << 32, x.z | (uint64_t)x.w << 32}; }
};

SIMT_DEV int offset_of(const unsigned char* place) { return reinterpret_cast<uintptr_t>(place) % 16; }

template <bool kIsAligned> SIMT_DEV Pair loaded(const unsigned char* place) {
  const int offset = offset_of(place);
  Arriving<kIsAligned> bytes;
  bytes.load(place - offset);
  return bytes.arrived(offset);
}
SIMT_DEV Pair pair_at(const unsigned char* place) { return offset_of(place) ? loaded<false>(place) : loaded<true>(place); }

SIMT_DEV uint64_t few_bytes(const unsigned char* from, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; i++) value |= (uint64_t)from[i] << 8 * i;
  return value;
}

// -- mixing

SIMT_DEV uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

SIMT_DEV uint64_t mixed(Pair data, Pair secret) { return folded(data.words[0] ^ secret.words[0], data.words[1] ^ secret.words[1]); }

SIMT_DEV uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kPrimeMx1;
  return x ^ x >> 32;
}

SIMT_DEV uint64_t avalanche_xxh64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64_2;
  x = (x ^ x >> 29) * kPrime64_3;
  return x ^ x >> 32;
}

SIMT_DEV uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

SIMT_DEV uint64_t reversed(uint64_t x) {
  return (uint64_t)simt::pick_bytes((uint32_t)x, 0, 0x0123) << 32 | simt::pick_bytes((uint32_t)(x >> 32), 0, 0x0123);
}

// The sum over lanes whose numbers differ in bits from `first` to below `end`.
SIMT_DEV uint64_t over_lanes(uint64_t x, int first, int end) {
  for (int bit = first; bit < end; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}

// -- up to 16 bytes: every lane computes all of it

SIMT_DEV uint64_t sum_to_3(const unsigned char* data, uint32_t length) {
  const uint32_t both = data[length - 1] | length << 8 | (uint32_t)data[0] << 16 | (uint32_t)data[length / 2] << 24;
  return avalanche_xxh64((uint32_t)(kSecret[0] ^ kSecret[0] >> 32) ^ both);
}

SIMT_DEV uint64_t sum_to_8(const unsigned char* data, uint32_t length) {
  const uint64_t both = few_bytes(data + length - 4, 4) | few_bytes(data, 4) << 32;
  uint64_t x = kSecret[1] ^ kSecret[2] ^ both;
  x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * kPrimeMx2;
  x = (x ^ ((x >> 35) + length)) * kPrimeMx2;
  return x ^ x >> 28;
}

SIMT_DEV uint64_t sum_to_16(const unsigned char* data, uint32_t length) {
  const uint64_t low = kSecret[3] ^ kSecret[4] ^ few_bytes(data, 8);
  const uint64_t high = kSecret[5] ^ kSecret[6] ^ few_bytes(data + length - 8, 8);
  return avalanche(length + reversed(low) + high + folded(low, high));
}

// -- up to 240 bytes: a lane mixes 16 of them

SIMT_DEV uint64_t sum_to_128(const unsigned char* data, uint32_t length) {
  const uint32_t lane = simt::lane(), step = lane / 2 * 16;  // even lanes go from the beginning on, odd ones from the end back
  uint64_t mine = 0;
  if (lane <= (length - 1) / 32 * 2 + 1) mine = mixed(pair_at(data + (lane % 2 ? length - 16 - step : step)), secrets_at(16 * lane));
  return avalanche(length * kPrime64_1 + over_lanes(mine, 1, 32));
}

SIMT_DEV uint64_t sum_to_240(const unsigned char* data, uint32_t length) {
  const uint32_t lane = simt::lane(), chunks = length / 16;
  uint64_t mine = 0;
  if (lane < chunks) mine = mixed(pair_at(data + 16 * lane), secrets_at(lane < 8 ? 16 * lane : 16 * (lane - 8) + 3));
  if (lane == chunks) mine = mixed(pair_at(data + length - 16), secrets_at(119));
  const uint64_t first = over_lanes(lane < 8 ? mine : 0, 1, 32), rest = over_lanes(lane < 8 ? 0 : mine, 1, 32);
  return avalanche(avalanche(length * kPrime64_1 + first) + rest);
}

// -- above: lane l has the stripes l / 4 and l / 4 + 8 of a block, of each the words 2 * (l % 4)
// and the next

// Adds 16 bytes of a stripe to their accumulators.
SIMT_DEV void accumulate(Pair& sums, Pair data, Pair secret) {
  for (int i = 0; i < 2; i++) {
    const uint64_t keyed = data.words[i] ^ secret.words[i];
    sums.words[i] += data.words[1 - i] + (uint64_t)(uint32_t)keyed * (uint32_t)(keyed >> 32);
  }
}

// The sum over the stripes of a block: of all lanes with the same words.
SIMT_DEV void gather(Pair& sums) {
  for (uint64_t& sum : sums.words) sum = over_lanes(sum, kStripeLanes, 32);
}

SIMT_DEV void add(Pair& to, Pair sums) {
  for (int i = 0; i < 2; i++) to.words[i] += sums.words[i];
}

SIMT_DEV void scramble(Pair& accumulators, Pair secret) {
  for (int i = 0; i < 2; i++) {
    uint64_t& x = accumulators.words[i];
    x = (x ^ x >> 47 ^ secret.words[i]) * kPrime32_1;
  }
}

// The last block's stripes without the final one, also if it is full. In its place come the slice's
// last 64 bytes, which may overlap.
template <bool kIsAligned> SIMT_DEV Pair last_block(const unsigned char* data, uint32_t length, const Pair (&secrets)[kHalves]) {
  const int lane = simt::lane(), stripes = (length - 1) % kBlockBytes / kStripeBytes;
  const unsigned char* block = data + (length - 1) / kBlockBytes * kBlockBytes;
  Pair sums = {};
  for (int half = 0; half < kHalves; half++)
    if (lane / kStripeLanes + 8 * half < stripes) accumulate(sums, loaded<kIsAligned>(block + 512 * half + 16 * lane), secrets[half]);
  if (lane < kStripeLanes) accumulate(sums, pair_at(data + length - kStripeBytes + 16 * lane), secrets_at(121 + 16 * lane));
  gather(sums);
  return sums;
}

template <bool kIsAligned> SIMT_DEV uint64_t sum_above_240(const unsigned char* data, uint32_t length) {
  const int lane = simt::lane(), words = 2 * (lane % kStripeLanes), stripe = lane / kStripeLanes, offset = offset_of(data);
  const Pair secrets[kHalves] = {secrets_at(8 * (stripe + words)), secrets_at(8 * (stripe + 8 + words))};
  const Pair scrambling = {kSecret[16 + words], kSecret[17 + words]};
  Pair accumulators = {kBegin[words], kBegin[words + 1]};
  const uint32_t blocks = (length - 1) / kBlockBytes;  // but the last
  const unsigned char* granules = data - offset + 16 * lane;
  Arriving<kIsAligned> ring[kAhead][kHalves] = {};
  const auto load = [&](Arriving<kIsAligned>(&place)[kHalves], uint32_t block) {
    if (block >= blocks) return;
    for (int half = 0; half < kHalves; half++) place[half].load(granules + (size_t)block * kBlockBytes + 512 * half);
  };
#pragma unroll
  for (int i = 0; i < kAhead; i++) load(ring[i], i);
  const Pair last = last_block<kIsAligned>(data, length, secrets);  // while the first blocks arrive
  for (uint32_t first = 0; first < blocks; first += kAhead) {
    Pair sums[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      for (int half = 0; half < kHalves; half++) accumulate(sums[i], ring[i][half].arrived(offset), secrets[half]);
      load(ring[i], first + i + kAhead);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) gather(sums[i]);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i >= blocks) break;
      add(accumulators, sums[i]);
      scramble(accumulators, scrambling);
    }
  }
  add(accumulators, last);
  return avalanche(length * kPrime64_1 + over_lanes(mixed(accumulators, secrets_at(11 + 8 * words)), 1, kStripeLanes));
}

SIMT_DEV uint64_t sum(const unsigned char* data, uint32_t length) {
  if (length == 0) return avalanche_xxh64(kSecret[7] ^ kSecret[8]);
  simt::assume_global(data);
  if (length <= 3) return sum_to_3(data, length);
  if (length <= 8) return sum_to_8(data, length);
  if (length <= 16) return sum_to_16(data, length);
  if (length <= 128) return sum_to_128(data, length);
  if (length <= 240) return sum_to_240(data, length);
  return reinterpret_cast<uintptr_t>(data) % 16 ? sum_above_240<false>(data, length) : sum_above_240<true>(data, length);
}

// A warp sums a slice, and a thread block has one warp: few slices then use all multiprocessors.
SIMT_DEV void sum_slice(const SumsParams& p) {
  const auto* data = reinterpret_cast<const unsigned char*>(p.addresses[blockIdx.x]);
  const uint64_t found = sum(data, p.lengths[blockIdx.x]);
  if (simt::lane() == 0) p.sums[blockIdx.x] = found;
}

}  // namespace tierd

using namespace tierd;

SIMT_RESIDENT_KERNEL(slice_sums, SumsParams, 32, 12, sum_slice)  // stated, or ptxas spills to fit more
