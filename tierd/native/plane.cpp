// The data plane's loops. They find blocks in a directory and copy them. One pass over a block
// copies it and sums it by XXH3-64.
//
// The plain forms, with the same results, are `tierd/client/blocks/copying.py` and
// `one_sided_get.py`; tests compare the two. XXH3 is Yann Collet's, written here from its
// description (doc/xxhash_spec.md of github.com/Cyan4973/xxHash): a stripe is 64 bytes, a block of
// it 16 stripes. The code reads each byte once, except the last 64 of a slice, so it stores the
// bytes that it sums. It checks values of a directory or a catalogue against the mapping's bounds
// before it computes an address from them.
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TIERD_API extern "C" [[gnu::visibility("default")]]

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sums and tables are little-endian");

// SEGMENT of tierd/client/session/mapping.py: a mapped segment. place: in the directory; segments
// ascend by it.
struct TierdSegment {
  uint64_t place;
  const uint8_t* data;
  const uint64_t* words;
  const uint8_t* metas;
  const uint64_t* tables;
  uint64_t class_bytes;
  uint32_t pages;
  uint32_t slice_words;
};

namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9, kPrimeMx2 = 0x9FB21C651E98DF25;
constexpr size_t kStripeBytes = 64, kStripes = 16, kChunkBytes = kStripeBytes * kStripes;
constexpr size_t kStreamFromBytes = 32 << 10;  // of a slice: the caches keep shorter ones

alignas(64) constexpr uint64_t kSecretWords[24] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82,
    0x8E2443F7744608B8, 0x4C263A81E69035E0, 0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8, 0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5,
    0x49DAF0B751DD0D17, 0x9E68D429265516D3, 0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};
const uint8_t* const kSecret = reinterpret_cast<const uint8_t*>(kSecretWords);

template <class Word> Word read(const uint8_t* from) {
  Word value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t mixed(const uint8_t* data, size_t secret) {
  return folded(read<uint64_t>(data) ^ read<uint64_t>(kSecret + secret), read<uint64_t>(data + 8) ^ read<uint64_t>(kSecret + secret + 8));
}

uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

uint64_t avalanche(uint64_t x) {
  x = (x ^ x >> 37) * kPrimeMx1;
  return x ^ x >> 32;
}

uint64_t avalanche_xxh64(uint64_t x) {
  x = (x ^ x >> 33) * kPrime64_2;
  x = (x ^ x >> 29) * kPrime64_3;
  return x ^ x >> 32;
}

uint64_t sum_to_16(const uint8_t* data, size_t length) {
  if (length > 8) {
    const uint64_t low = kSecretWords[3] ^ kSecretWords[4] ^ read<uint64_t>(data);
    const uint64_t high = kSecretWords[5] ^ kSecretWords[6] ^ read<uint64_t>(data + length - 8);
    return avalanche(length + __builtin_bswap64(low) + high + folded(low, high));
  }
  if (length > 3) {
    uint64_t x = kSecretWords[1] ^ kSecretWords[2] ^ (read<uint32_t>(data + length - 4) + (static_cast<uint64_t>(read<uint32_t>(data)) << 32));
    x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * kPrimeMx2;
    x = (x ^ ((x >> 35) + length)) * kPrimeMx2;
    return x ^ x >> 28;
  }
  if (length == 0) return avalanche_xxh64(kSecretWords[7] ^ kSecretWords[8]);
  const uint64_t both = data[length - 1] | length << 8 | static_cast<uint64_t>(data[0]) << 16 | static_cast<uint64_t>(data[length / 2]) << 24;
  return avalanche_xxh64(static_cast<uint32_t>(kSecretWords[0] ^ kSecretWords[0] >> 32) ^ both);
}

uint64_t sum_to_240(const uint8_t* data, size_t length) {
  uint64_t sum = length * kPrime64_1;
  if (length <= 128) {
    for (size_t i = (length - 1) / 32 + 1; i-- > 0;) sum += mixed(data + 16 * i, 32 * i) + mixed(data + length - 16 * (i + 1), 32 * i + 16);
    return avalanche(sum);
  }
  for (size_t i = 0; i < 8; i++) sum += mixed(data + 16 * i, 16 * i);
  sum = avalanche(sum);
  for (size_t i = 8; i < length / 16; i++) sum += mixed(data + 16 * i, 16 * (i - 8) + 3);
  return avalanche(sum + mixed(data + length - 16, 119));
}

void gather(uint64_t* sums, const uint8_t* stripe, size_t secret) {
  for (size_t i = 0; i < 8; i++) {
    const uint64_t data = read<uint64_t>(stripe + 8 * i), key = data ^ read<uint64_t>(kSecret + secret + 8 * i);
    sums[i ^ 1] += data;
    sums[i] += (key & 0xFFFFFFFF) * (key >> 32);
  }
}

// Sums whole chunks from source on, and copies them to target unless it is null.
using Chunks = void (*)(uint64_t* sums, const uint8_t* source, uint8_t* target, size_t chunks);

void plain_chunks(uint64_t* sums, const uint8_t* source, uint8_t* target, size_t chunks) {
  uint8_t chunk[kChunkBytes];
  for (; chunks-- > 0; source += kChunkBytes) {
    std::memcpy(chunk, source, kChunkBytes);
    for (size_t i = 0; i < kStripes; i++) gather(sums, chunk + kStripeBytes * i, 8 * i);
    for (size_t i = 0; i < 8; i++) sums[i] = (sums[i] ^ sums[i] >> 47 ^ kSecretWords[16 + i]) * kPrime32_1;
    if (target != nullptr) {
      std::memcpy(target, chunk, kChunkBytes);
      target += kChunkBytes;
    }
  }
}

#if defined(__x86_64__)
enum class Store { none, cached, streamed16, streamed32 };

template <Store kStore> [[gnu::target("avx2")]] inline void store(uint8_t* target, __m256i data) {
  if constexpr (kStore == Store::cached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), data);
  if constexpr (kStore == Store::streamed32) _mm256_stream_si256(reinterpret_cast<__m256i*>(target), data);
  if constexpr (kStore == Store::streamed16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(data));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + 16), _mm256_extracti128_si256(data, 1));
  }
}

template <Store kStore> [[gnu::target("avx2")]] void avx2_chunks(uint64_t* sums, const uint8_t* source, uint8_t* target, size_t chunks) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  __m256i halves[2] = {_mm256_loadu_si256(reinterpret_cast<__m256i*>(sums)), _mm256_loadu_si256(reinterpret_cast<__m256i*>(sums + 4))};
  for (; chunks-- > 0; source += kChunkBytes, target += kStore == Store::none ? 0 : kChunkBytes) {
    for (size_t i = 0; i < kStripes; i++) {
      if constexpr (kStore != Store::none) _mm_prefetch(reinterpret_cast<const char*>(source + 2 * kChunkBytes + kStripeBytes * i), _MM_HINT_NTA);
      for (size_t half = 0; half < 2; half++) {
        const size_t at = kStripeBytes * i + 32 * half;
        const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + at));
        const __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + 8 * i + 32 * half)));
        const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
        halves[half] = _mm256_add_epi64(halves[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
        store<kStore>(target + at, data);
      }
    }
    for (size_t half = 0; half < 2; half++) {
      __m256i sum = _mm256_xor_si256(halves[half], _mm256_srli_epi64(halves[half], 47));
      sum = _mm256_xor_si256(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + 128 + 32 * half)));
      halves[half] = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32));
    }
  }
  for (size_t half = 0; half < 2; half++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4 * half), halves[half]);
}

Chunks chunks_for(const uint8_t* target, size_t length) {
  if (!__builtin_cpu_supports("avx2")) return plain_chunks;
  if (target == nullptr) return avx2_chunks<Store::none>;
  const auto at = reinterpret_cast<uintptr_t>(target);
  if (length < kStreamFromBytes || at % 16) return avx2_chunks<Store::cached>;
  return at % 32 ? avx2_chunks<Store::streamed16> : avx2_chunks<Store::streamed32>;
}
void fence() { _mm_sfence(); }
#else
Chunks chunks_for(const uint8_t*, size_t) { return plain_chunks; }
void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

// The sum of one slice. Copies its bytes to target unless that is null.
uint64_t sum_slice(const uint8_t* source, uint8_t* target, size_t length) {
  uint8_t tail[kChunkBytes + kStripeBytes];
  const size_t chunks = length > 240 ? (length - 1) / kChunkBytes : 0, done = chunks * kChunkBytes, left = length - done;
  uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  if (chunks) chunks_for(target, length)(sums, source, target, chunks);
  const size_t before = left < kStripeBytes && done ? kStripeBytes - left : 0;  // the last stripe overlaps the chunks
  std::memcpy(tail, source + done - before, before + left);
  if (target != nullptr) std::memcpy(target + done, tail + before, left);
  if (length <= 16) return sum_to_16(tail, length);
  if (length <= 240) return sum_to_240(tail, length);
  for (size_t i = 0; i < (left - 1) / kStripeBytes; i++) gather(sums, tail + before + kStripeBytes * i, 8 * i);
  gather(sums, tail + before + left - kStripeBytes, 121);
  uint64_t sum = length * kPrime64_1;
  for (size_t i = 0; i < 4; i++) sum += folded(sums[2 * i] ^ read<uint64_t>(kSecret + 11 + 16 * i), sums[2 * i + 1] ^ read<uint64_t>(kSecret + 19 + 16 * i));
  return avalanche(sum);
}

// -- blocks

constexpr size_t kSliceMaxBytes = 256 << 10, kSlicesMax = 480, kPageBytes = 4096;

struct Cut {
  size_t piece, pieces, last, layers;
};

// As `slice_cut` of tierd/core/formats/block.py.
Cut cut_of(size_t length, size_t layers) {
  if (length == 0) return {0, 1, 0, 0};
  size_t layer = layers > 0 && length % layers == 0 ? length / layers : length;
  const auto slices = [](size_t bytes) { return (bytes + kSliceMaxBytes - 1) / kSliceMaxBytes; };
  if (layer < kPageBytes || slices(layer) * (length / layer) > kSlicesMax) layer = length;
  const size_t pieces = slices(layer) < kSlicesMax ? slices(layer) : kSlicesMax, piece = (layer + pieces - 1) / pieces;
  return {piece, pieces, layer - piece * (pieces - 1), length / layer};
}

// -- directories and catalogues, which the daemon may write during a read

constexpr size_t kHashBytes = 32, kMetaBytes = 256, kSlots = 4, kSlotBits = 24;
constexpr uint32_t kMetaMagic = 0x7D5E71E2, kMetaVersion = 2;  // and 1, which has no error field

uint64_t word_at(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

uint64_t key_of(uint64_t namespace_id, const uint8_t* hash) { return (read<uint64_t>(hash) ^ namespace_id * 0x9E3779B97F4A7C15) | 1; }

// The entry of a key in the bucket of one spread; null if the bucket has none.
const uint64_t* entry_of(const uint64_t* directory, uint64_t buckets, uint64_t key, uint64_t spread) {
  const uint64_t* bucket = directory + 2 * kSlots * ((key * spread >> 32) & (buckets - 1));
  for (size_t i = 0; i < kSlots; i++) {
    if (word_at(bucket + 2 * i) == key) return bucket + 2 * i;
  }
  return nullptr;
}

const uint64_t* entry_of(const uint64_t* directory, uint64_t buckets, uint64_t key) {
  const uint64_t* first = entry_of(directory, buckets, key, 0xC2B2AE3D27D4EB4F);
  return first != nullptr ? first : entry_of(directory, buckets, key, 0xD6E8FEB86659FD93);
}

// The index of the segment at a place; count if there is none. The segments ascend.
uint64_t segment_at(const TierdSegment* segments, uint64_t count, uint64_t place) {
  uint64_t first = 0, end = count;
  while (first < end) {
    const uint64_t middle = (first + end) / 2;
    if (segments[middle].place < place) first = middle + 1;
    else end = middle;
  }
  return first < count && segments[first].place == place ? first : count;
}

}  // namespace

// BLOCK of tierd/client/blocks/copying.py.
struct TierdBlock {
  const uint8_t* source;
  uint8_t* target;  // null: the block is only summed
  uint64_t length;
  uint64_t layers;
};

// Copies a block and writes its slices' sums; returns the end of these.
static uint64_t* sum_block(const TierdBlock& block, uint64_t* sums) {
  const Cut cut = cut_of(block.length, block.layers);
  size_t at = 0;
  for (size_t i = 0; i < cut.layers * cut.pieces; i++) {
    const size_t length = i % cut.pieces == cut.pieces - 1 ? cut.last : cut.piece;
    *sums++ = sum_slice(block.source + at, block.target == nullptr ? nullptr : block.target + at, length);
    at += length;
  }
  return sums;
}

// Copies blocks and writes their slices' sums to sums; returns how many are done. If *is_over is
// not 0 before a block, that block and later ones are not touched.
TIERD_API uint64_t tierd_sum_and_copy(const TierdBlock* blocks, uint64_t count, uint64_t* sums, const volatile int32_t* is_over) {
  uint64_t done = 0;
  for (; done < count && !*is_over; done++) sums = sum_block(blocks[done], sums);
  fence();
  return done;
}

// PAGE of tierd/client/blocks/one_sided_get.py: a published page, as its entry says.
struct TierdPage {
  const uint8_t* source;
  uint64_t length;
  uint64_t layers;
  uint64_t generation;
  const uint64_t* table;
  const uint64_t* word;
  uint32_t segment;  // index into the segments
  uint32_t slot;
};

struct TierdNames {
  const uint8_t* hashes;  // of 32 bytes each
  uint64_t count;
  uint32_t namespace_id;
  uint32_t tokens;  // of each block
  uint32_t last_tokens;  // of the last one
};

// Looks up blocks and their pages in a directory of so many buckets; returns the number of hits
// before the first miss. *unmapped: the place of an unknown segment that may hold the next block,
// else all bits set.
TIERD_API uint64_t tierd_find(const uint64_t* directory, uint64_t buckets, const TierdSegment* segments, uint64_t segment_count, const TierdNames* names, TierdPage* pages, uint64_t* unmapped) {
  *unmapped = ~uint64_t{0};
  for (uint64_t i = 0; i < names->count; i++) {
    const uint8_t* hash = names->hashes + kHashBytes * i;
    const uint64_t* entry = entry_of(directory, buckets, key_of(names->namespace_id, hash));
    if (entry == nullptr) return i;
    const uint64_t place = word_at(entry + 1);
    const uint64_t at = segment_at(segments, segment_count, place >> kSlotBits), slot = place & ((1 << kSlotBits) - 1);
    if (at == segment_count) {
      *unmapped = place >> kSlotBits;
      return i;
    }
    const TierdSegment& segment = segments[at];
    if (slot >= segment.pages) return i;
    uint8_t meta[kMetaBytes];  // a copy: the daemon may write the entry meanwhile
    std::memcpy(meta, segment.metas + kMetaBytes * slot, kMetaBytes);
    const uint32_t version = read<uint16_t>(meta + 4), tokens = i + 1 < names->count ? names->tokens : names->last_tokens;
    const uint64_t length = read<uint32_t>(meta + 92), generation = read<uint64_t>(meta + 104), layers = read<uint32_t>(meta + 204);
    if (read<uint32_t>(meta + 213) != 0) break;  // its values have an error
    const bool is_entry = read<uint32_t>(meta) == kMetaMagic && (version == 1 || version == kMetaVersion) &&
        sum_slice(meta, nullptr, kMetaBytes - 8) == read<uint64_t>(meta + kMetaBytes - 8);
    const bool is_its = std::memcmp(meta + 8, hash, kHashBytes) == 0 && read<uint32_t>(meta + 72) == names->namespace_id && read<uint32_t>(meta + 84) == tokens;
    if (!is_entry || !is_its || length == 0 || length > segment.class_bytes) return i;  // past this check its slices fit the table
    if (word_at(segment.words + slot) != generation) return i;
    pages[i] = {segment.data + segment.class_bytes * slot, length, layers, generation, segment.tables + segment.slice_words * slot, segment.words + slot, static_cast<uint32_t>(at), static_cast<uint32_t>(slot)};
  }
  return names->count;
}

// Sets good to 1 for each page with sums as in its table and an unchanged generation, else to 0;
// returns the number of good pages. mask: the bits of a page's word to compare.
TIERD_API uint64_t tierd_check(const TierdPage* pages, uint64_t count, const uint64_t* sums, uint64_t mask, uint8_t* good) {
  uint64_t all = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (uint64_t i = 0; i < count; i++) {
    const Cut cut = cut_of(pages[i].length, pages[i].layers);
    const size_t slices = cut.layers * cut.pieces;
    const bool is_good = pages[i].table != nullptr && std::memcmp(pages[i].table, sums, 8 * slices) == 0;
    good[i] = is_good && (word_at(pages[i].word) & mask) == pages[i].generation;
    all += good[i];
    sums += slices;
  }
  return all;
}

// PIECE of tierd/tiers/io/pieces.py.
struct TierdPiece {
  uint64_t offset;
  uint8_t* head;  // null: all of the piece goes to target
  uint8_t* target;
  uint64_t length;
  uint64_t layers;
  uint64_t* sums;
  int64_t error;
};

// Reads pieces of a file and sums their slices; returns how many came. Of a piece that does not
// come, sums stay, and error is set unless the file ends before it.
TIERD_API uint64_t tierd_read_pieces(uint64_t file, TierdPiece* pieces, uint64_t count) {
  uint64_t came = 0;
  for (TierdPiece* piece = pieces; piece != pieces + count; piece++) {
    const size_t head = piece->head == nullptr ? 0 : kPageBytes, all = head + (piece->length + kPageBytes - 1) / kPageBytes * kPageBytes;
    size_t done = 0;
    while (done < all) {
      const size_t in_head = done < head ? done : head;
      const iovec parts[2] = {{piece->head + in_head, head - in_head}, {piece->target + (done - in_head), all - head - (done - in_head)}};
      const ssize_t got = preadv(static_cast<int>(file), parts + (done >= head), done < head ? 2 : 1, static_cast<off_t>(piece->offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) piece->error = errno;
      const size_t step = got <= 0 ? 0 : done + static_cast<size_t>(got) == all ? all - done : static_cast<size_t>(got) / kPageBytes * kPageBytes;
      if (step == 0) break;
      done += step;
    }
    if (done < all) continue;
    sum_block({piece->target, nullptr, piece->length, piece->layers}, piece->sums);
    piece->error = 0;
    came++;
  }
  return came;
}

// The id of the source of this library.
TIERD_API const char* tierd_source() { return TIERD_SOURCE; }
