// Sparse decode over tiers: bounds of the keys of granules of 64 tokens, scores of granules, exact
// top-k, hot slots, and fetches from host memory (tierd/kernels/granules.py defines the results).
//
// Launches have fixed shapes, and no host code reads a result: a captured graph replays with growing
// contexts. A row is a request and a kv head.
#include <math.h>

#include "formats.h"

#ifndef TIERD_DIMS  // head dims of the built kernels; fewer for a quick build
#define TIERD_DIMS(EACH) EACH(64) EACH(96) EACH(128) EACH(256)
#endif

namespace tierd {

// -- bounds: least and greatest key per channel, rounded outward to bf16; NaN if a key is

constexpr int kGranuleTokens = 64, kSlotTokens = 16, kSlots = kGranuleTokens / kSlotTokens;

struct BoundParams {
  const unsigned char* k;  // of one layer; strides in bytes
  int64_t page_stride, token_stride, head_stride;
  const int64_t* slots;  // [granules][kSlots]: page * page_tokens + offset of each 16 tokens; unused ones hold anything
  const int* tokens;     // [granules]: how many are there
  unsigned char* to;     // [granules][kv_heads][2][dim] of bf16; strides in bytes
  int64_t to_granule_stride, to_head_stride;
  int dim, page_tokens, pages;
};

// A thread takes two channels at a time.
template <class From> SIMT_DEV void bound(const BoundParams& p) {
  using Pair = Pack<typename From::Value, 2>;
  const int granule = blockIdx.x, head = blockIdx.y, tokens = p.tokens[granule];
  SIMT_CHECK(tokens >= 0 && tokens <= kGranuleTokens, "granule %d of bounds: %d tokens, and there is room for %d", granule, tokens, kGranuleTokens);
  for (int pair = threadIdx.x; pair < p.dim / 2; pair += blockDim.x) {
    float least[2] = {INFINITY, INFINITY}, greatest[2] = {-INFINITY, -INFINITY};
    for (int first = 0; first < tokens; first += kSlotTokens) {
      const int64_t slot = p.slots[granule * kSlots + first / kSlotTokens];
      SIMT_CHECK(slot >= 0 && slot / p.page_tokens < p.pages && slot % p.page_tokens <= p.page_tokens - kSlotTokens,
                 "granule %d of bounds: slot %lld, and the pool has %d pages of %d tokens", granule, (long long)slot, p.pages, p.page_tokens);
      const unsigned char* keys = p.k + slot / p.page_tokens * p.page_stride + slot % p.page_tokens * p.token_stride + head * p.head_stride;
      const int last = min(tokens - first, kSlotTokens) - 1;
#pragma unroll
      for (int i = 0; i < kSlotTokens; i++) {  // the last token again for those that are not there: loads need no branch
        const Pair some = reinterpret_cast<const Pair*>(keys + min(i, last) * p.token_stride)[pair];
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float x = From::widen(some.values[c]);
          least[c] = x < least[c] || x != x ? x : least[c], greatest[c] = x > greatest[c] || x != x ? x : greatest[c];
        }
      }
    }
    auto* to = reinterpret_cast<Pack<__nv_bfloat16, 2>*>(p.to + granule * p.to_granule_stride + head * p.to_head_stride);
    to[pair] = {__float2bfloat16_rd(least[0]), __float2bfloat16_rd(least[1])};
    to[p.dim / 2 + pair] = {__float2bfloat16_ru(greatest[0]), __float2bfloat16_ru(greatest[1])};
  }
}

// -- score: upper bounds of products with the keys of a granule

struct ScoreParams {
  const unsigned char* q;       // [requests][q_heads][dim]
  const unsigned char* bounds;  // [granules][kv_heads][2][dim] of bf16; strides in bytes
  int64_t granule_stride, head_stride;
  const int *tables, *counts;  // [requests][table_stride] ids of granules in order; [requests], how many
  float* scores;               // [requests][kv_heads][table_stride]
  int q_heads, kv_heads, table_stride, granules;
};

// Tensor cores multiply: rows are 16 granules, columns eight query heads. Of bounds 512 bytes of a
// granule and head with 128 channels are read once, 8.4 MB for 128 K tokens and eight heads, 2.8 us at
// 3 TB/s; arithmetic by FMAs alone would take a query from shared memory for each. Channels are in
// the order in which lanes load them, 16 bytes each, the same for both operands. bf16 products are
// exact. An f16 query is the sum of two bf16 numbers.
constexpr int kScoreThreads = 128, kTileGranules = 16;

template <class Query> struct Parts;
template <> struct Parts<Bf16> {
  static constexpr int kCount = 1;
  static SIMT_DEV float of(float x, int) { return x; }
};
template <> struct Parts<F16> {
  static constexpr int kCount = 2;
  static SIMT_DEV float of(float x, int part) {
    const float high = Bf16::widen(Bf16::round(x));
    return part == 0 ? high : x - high;
  }
};

template <class Query, int kDim> struct Score {
  static constexpr int kBlocks = kDim / 32;  // of channels: a lane has 8 of each
  static constexpr int kAtOnce = kBlocks < 4 ? kBlocks : 4;
  static constexpr int kParts = Parts<Query>::kCount;
  struct alignas(16) Words {
    uint32_t words[4];
  };

  // Place of a lane's operand b. side: 0 for the negative part of queries, 1 for the positive one.
  static SIMT_DEV int at(int set, int part, int side, int block, int lane) { return (((set * kParts + part) * 2 + side) * kBlocks + block) * 32 + lane; }

  static SIMT_DEV void store_queries(const ScoreParams& p, Words* operands, int group) {
    const auto* q = reinterpret_cast<const typename Query::Value*>(p.q) + ((int64_t)blockIdx.z * p.q_heads + blockIdx.y * group) * kDim;
    const int heads = (group + 7) / 8 * 8;
    for (int i = threadIdx.x; i < heads * kDim / 8; i += kScoreThreads) {
      const int head = i / (kDim / 8), piece = i % (kDim / 8);
      const Pack<typename Query::Value, 8> some = head < group ? reinterpret_cast<const Pack<typename Query::Value, 8>*>(q)[i] : Pack<typename Query::Value, 8>{};
      for (int part = 0; part < kParts; part++)
        for (int side = 0; side < 2; side++) {
          float x[8];
#pragma unroll
          for (int c = 0; c < 8; c++) {
            x[c] = Query::widen(some.values[c]);
            x[c] = (side ? x[c] < 0.f : x[c] > 0.f) ? 0.f : Parts<Query>::of(x[c], part);  // NaN is in both
          }
          operands[at(head / 8, part, side, piece / 4, head % 8 * 4 + piece % 4)] = {Bf16::pack(x[0], x[1]), Bf16::pack(x[2], x[3]), Bf16::pack(x[4], x[5]), Bf16::pack(x[6], x[7])};
        }
    }
  }

  // A row's bounds; null behind the last row.
  static SIMT_DEV const Words* row_at(const ScoreParams& p, int row, int count) {
    if (row >= count) return nullptr;
    const int id = p.tables[(int64_t)blockIdx.z * p.table_stride + row];
    SIMT_CHECK(id >= 0 && id < p.granules, "request %u, granule %d: id %d, and there are bounds of %d", blockIdx.z, row, id, p.granules);
    return reinterpret_cast<const Words*>(p.bounds + id * p.granule_stride + blockIdx.y * p.head_stride) + simt::lane() % 4;
  }

  static SIMT_DEV void run(const ScoreParams& p) {
    SIMT_SHARED(shared);
    auto* operands = reinterpret_cast<Words*>(shared);
    const int group = p.q_heads / p.kv_heads, lane = simt::lane(), warps = kScoreThreads / 32;
    store_queries(p, operands, group);
    __syncthreads();
    const int count = p.counts[blockIdx.z];
    SIMT_CHECK(count >= 0 && count <= p.table_stride, "request %u: %d granules, and its table has room for %d", blockIdx.z, count, p.table_stride);
    for (int first = (blockIdx.x * warps + simt::warp()) * kTileGranules; first < count; first += gridDim.x * warps * kTileGranules) {
      const Words* rows[2] = {row_at(p, first + lane / 4, count), row_at(p, first + 8 + lane / 4, count)};
      float sums[2][4] = {};
#pragma unroll 1  // or loads of the first blocks wait for products
      for (int start = 0; start < kBlocks; start += kAtOnce) {
        Words a[kAtOnce][2][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
#pragma unroll
          for (int side = 0; side < 2; side++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[i][side][r] = rows[r] ? rows[r][side * (kDim / 8) + (start + i) * 4] : Words{};
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
#pragma unroll
          for (int side = 0; side < 2; side++)
#pragma unroll
            for (int set = 0; set < 2; set++) {
              if (8 * set >= group) break;
#pragma unroll
              for (int part = 0; part < kParts; part++) {
                const Words b = operands[at(set, part, side, start + i, lane)];
#pragma unroll
                for (int half = 0; half < 4; half += 2) {
                  const uint32_t fragment[4] = {a[i][side][0].words[half], a[i][side][1].words[half], a[i][side][0].words[half + 1], a[i][side][1].words[half + 1]};
                  simt::multiply_add(sums[set], fragment, b.words[half], b.words[half + 1], __nv_bfloat16());
                }
              }
            }
      }
      float* scores = p.scores + ((int64_t)blockIdx.z * p.kv_heads + blockIdx.y) * p.table_stride;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float best = -INFINITY;
#pragma unroll
        for (int set = 0; set < 2; set++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const float sum = sums[set][2 * r + c];
            if (8 * set + lane % 4 * 2 + c < group) best = fmaxf(best, sum != sum ? INFINITY : sum);
          }
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        const int row = first + 8 * r + lane / 4;
        if (lane % 4 == 0 && row < count) scores[row] = best;
      }
    }
  }
};

// -- choose: exact top-k of a row by one block (radix selection, eight bits at a time)

struct ChooseParams {
  const float* scores;  // [rows][table_stride]
  const int* counts;    // [requests], granules
  int *chosen, *sizes;  // [rows][k], rising; [rows]
  int kv_heads, table_stride, k, forced_first, forced_last;
};

constexpr int kBins = 256, kChooseThreads = 1024, kResolveThreads = 256, kFetchThreads = 256;
constexpr int kAhead = 4;  // loads of one thread in flight

// Of a block's threads for which it is so: the number before this thread, and of all.
struct Rank {
  int before, all;

  // counts: an int for each warp.
  static SIMT_DEV Rank of(bool is_so, int* counts) {
    const uint32_t mask = __ballot_sync(~0u, is_so);
    __syncthreads();  // the last call's counts were read
    if (simt::lane() == 0) counts[simt::warp()] = __popc(mask);
    __syncthreads();
    Rank rank{__popc(mask & ((1u << simt::lane()) - 1)), 0};
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) rank.before += warp < simt::warp() ? counts[warp] : 0, rank.all += counts[warp];
    return rank;
  }
};

// Numbers in the order of scores; NaN is +inf, and -0 is 0.
SIMT_DEV uint32_t order_of(float score) {
  const uint32_t bits = bit_cast<uint32_t>((score != score ? INFINITY : score) + 0.f);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// Scores of at least `least` in the bits of `mask` are chosen, of equal ones the first `equal`.
struct Threshold {
  uint32_t least, mask;
  int equal, of_equal;

  // bins: of kBins, and three numbers more.
  static SIMT_DEV Threshold of(const float* scores, int count, int wanted, uint32_t* bins) {
    Threshold found{0, 0, wanted, count};
    for (int shift = 24; shift >= 0 && found.equal < found.of_equal; shift -= 8) {
      for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) bins[bin] = 0;
      __syncthreads();
      for (int start = threadIdx.x; start < count; start += kAhead * blockDim.x) {
        float some[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) some[i] = start + i * (int)blockDim.x < count ? scores[start + i * blockDim.x] : 0.f;
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
          const uint32_t order = order_of(some[i]);
          if (start + i * (int)blockDim.x < count && (order & found.mask) == found.least) atomicAdd(&bins[order >> shift & (kBins - 1)], 1u);
        }
      }
      __syncthreads();
      if (simt::warp() == 0) find_bin(bins, found.equal);
      __syncthreads();
      found.least |= bins[kBins] << shift, found.mask |= (kBins - 1u) << shift, found.equal = bins[kBins + 1], found.of_equal = bins[kBins + 2];
    }
    return found;
  }

  // A warp finds the bin of the score with this rank, from the last bin down. A lane has eight bins.
  static SIMT_DEV void find_bin(uint32_t* bins, uint32_t rank) {
    const uint32_t* mine = bins + kBins - 1 - 8 * simt::lane();
    uint32_t own = 0;
    for (int i = 0; i < 8; i++) own += *(mine - i);
    uint32_t sum = own;
    for (int by = 1; by < 32; by *= 2) {
      const uint32_t before = __shfl_up_sync(~0u, sum, by);
      sum += simt::lane() >= by ? before : 0;
    }
    uint32_t above = sum - own;
    if (above >= rank || sum < rank) return;
    while (above + *mine < rank) above += *mine--;
    bins[kBins] = mine - bins, bins[kBins + 1] = rank - above, bins[kBins + 2] = *mine;
  }
};

SIMT_DEV void choose(const ChooseParams& p) {
  SIMT_SHARED(shared);
  auto* bins = reinterpret_cast<uint32_t*>(shared);
  auto* counts = reinterpret_cast<int*>(bins + kBins + 3);
  const int row = blockIdx.y * p.kv_heads + blockIdx.x, count = p.counts[blockIdx.y], size = min(count, p.k);
  const bool is_all = count <= p.k;
  const int first = is_all ? count : p.forced_first, last = is_all ? 0 : p.forced_last, middle = count - first - last;
  int* chosen = p.chosen + (int64_t)row * p.k;
  if (threadIdx.x == 0) p.sizes[row] = size;
  for (int i = threadIdx.x; i < first; i += blockDim.x) chosen[i] = i;
  for (int i = threadIdx.x; i < last; i += blockDim.x) chosen[size - last + i] = count - last + i;
  const int wanted = size - first - last;
  if (wanted == 0) return;
  const float* scores = p.scores + (int64_t)row * p.table_stride + first;
  const Threshold of = Threshold::of(scores, middle, wanted, bins);
  const bool has_ties = of.equal < of.of_equal;
  int done = 0, equal = 0;
  for (int start = 0; start < middle; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const uint32_t order = i < middle ? order_of(scores[i]) & of.mask : 0;
    const bool is_equal = i < middle && order == of.least;
    bool is_chosen = i < middle && order >= of.least;
    if (has_ties) {
      const Rank rank = Rank::of(is_equal, counts);
      is_chosen = is_chosen && (!is_equal || equal + rank.before < of.equal);
      equal += rank.all;
    }
    const Rank rank = Rank::of(is_chosen, counts);
    if (is_chosen) chosen[first + done + rank.before] = first + i;
    done += rank.all;
  }
}

// -- resolve: hot slots of the chosen granules; those of misses by CLOCK

struct ResolveParams {
  const int *chosen, *sizes;  // of choose
  int *where, *owners;        // [rows][table_stride], a granule's slot; [rows][slots], a slot's granule; or kAbsent
  unsigned char* used;        // [rows][slots]: kUsed, or not; kKept only in a launch
  int* hands;                 // [rows], the slot to look at next
  int *hits, *misses;         // [rows][k], slots
  int *hit_sizes, *miss_sizes;
  int kv_heads, table_stride, k, slots;
};

constexpr int kAbsent = -1;
enum Use : unsigned char { kUnused, kUsed, kKept };

SIMT_DEV void resolve(const ResolveParams& p) {
  SIMT_SHARED(shared);
  auto* counts = reinterpret_cast<int*>(shared);
  const int row = blockIdx.y * p.kv_heads + blockIdx.x, size = p.sizes[row];
  const int *chosen = p.chosen + (int64_t)row * p.k;
  int *where = p.where + (int64_t)row * p.table_stride, *owners = p.owners + (int64_t)row * p.slots;
  int *hits = p.hits + (int64_t)row * p.k, *misses = p.misses + (int64_t)row * p.k;
  unsigned char* used = p.used + (int64_t)row * p.slots;
  SIMT_CHECK(size >= 0 && size <= min(p.k, p.slots), "row %d: %d granules are chosen, and there are %d hot slots", row, size, p.slots);
  int found = 0;
  for (int start = 0; start < size; start += blockDim.x) {
    const int i = start + threadIdx.x, granule = i < size ? chosen[i] : 0;
    SIMT_CHECK(granule >= 0 && granule < p.table_stride, "row %d: granule %d is chosen of %d", row, granule, p.table_stride);
    const int slot = i < size ? where[granule] : kAbsent;
    const Rank rank = Rank::of(slot != kAbsent, counts);
    if (slot != kAbsent) hits[found + rank.before] = slot, used[slot] = kKept;
    else if (i < size) misses[i - found - rank.before] = granule;
    found += rank.all;
  }
  __syncthreads();
  // The hand passes each slot at most twice. In the first round it takes unused ones and takes away
  // the use of others; so in the second it takes all.
  const int wanted = size - found, hand = p.hands[row];
  int taken = 0;
  for (int round = 0; round < 2; round++)
    for (int start = 0; start < p.slots && taken < wanted; start += blockDim.x) {
      const int i = start + threadIdx.x, slot = hand + i < p.slots ? hand + i : hand + i - p.slots;
      const unsigned char use = i < p.slots ? used[slot] : (unsigned char)kKept;
      const Rank rank = Rank::of(use == kUnused, counts);
      const int nth = taken + rank.before;
      if (use == kUsed && nth < wanted) used[slot] = kUnused;
      if (use == kUnused && nth < wanted) {
        const int granule = misses[nth], evicted = owners[slot];
        if (evicted != kAbsent) where[evicted] = kAbsent;
        where[granule] = slot, owners[slot] = granule, used[slot] = kKept, misses[nth] = slot;
        if (nth == wanted - 1) p.hands[row] = slot + 1 < p.slots ? slot + 1 : 0;
      }
      taken += rank.all;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) used[i < found ? hits[i] : misses[i - found]] = kUsed;
  if (threadIdx.x == 0) p.hit_sizes[row] = found, p.miss_sizes[row] = wanted;
}

// -- fetch: granules of misses from mapped host memory into their hot slots

struct FetchParams {
  const int *misses, *miss_sizes, *owners;  // of resolve
  const uint64_t* sources;                  // [requests][table_stride][parts], addresses for kv head 0
  unsigned char* hot;                       // [requests][slots][kv_heads][parts * part_bytes]; strides in bytes
  int64_t request_stride, slot_stride, head_stride;
  int64_t source_offset, source_head_stride;  // of the layer; from one kv head to the next
  int kv_heads, table_stride, k, slots, parts, part_bytes;
};

// Works with any grid: a row's blocks take parts of granules in turn.
SIMT_DEV void fetch(const FetchParams& p) {
  const int request = blockIdx.z, head = blockIdx.y, row = request * p.kv_heads + head, all = p.miss_sizes[row] * p.parts;
  for (int i = blockIdx.x; i < all; i += gridDim.x) {
    const int slot = p.misses[(int64_t)row * p.k + i / p.parts], part = i % p.parts, granule = p.owners[(int64_t)row * p.slots + slot];
    const auto* from = reinterpret_cast<const uint4*>(p.sources[((int64_t)request * p.table_stride + granule) * p.parts + part] + p.source_offset + head * p.source_head_stride);
    auto* to = reinterpret_cast<uint4*>(p.hot + request * p.request_stride + slot * p.slot_stride + head * p.head_stride + (int64_t)part * p.part_bytes);
    simt::assume_global(from), simt::assume_global(to);
    const int pieces = p.part_bytes / 16;
    for (int start = threadIdx.x; start < pieces; start += kAhead * kFetchThreads) {
      uint4 some[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; j++) some[j] = start + j * kFetchThreads < pieces ? from[start + j * kFetchThreads] : uint4{};
#pragma unroll
      for (int j = 0; j < kAhead; j++)
        if (start + j * kFetchThreads < pieces) to[start + j * kFetchThreads] = some[j];
    }
  }
}

}  // namespace tierd

using namespace tierd;

SIMT_KERNEL(bound_bf16, BoundParams, 64, bound<Bf16>)
SIMT_KERNEL(bound_f16, BoundParams, 64, bound<F16>)
SIMT_KERNEL(bound_e4m3, BoundParams, 64, bound<FromE4m3>)
SIMT_KERNEL(choose_granules, ChooseParams, kChooseThreads, choose)
SIMT_KERNEL(resolve_granules, ResolveParams, kResolveThreads, resolve)
SIMT_KERNEL(fetch_granules, FetchParams, kFetchThreads, fetch)

#define SCORE(DIM)                                                                             \
  SIMT_KERNEL(score_bf16_##DIM, ScoreParams, kScoreThreads, (Score<Bf16, DIM>::run)) \
  SIMT_KERNEL(score_f16_##DIM, ScoreParams, kScoreThreads, (Score<F16, DIM>::run))

TIERD_DIMS(SCORE)
