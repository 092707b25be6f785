// Collectives of a warp's threads: they meet, the last to arrive does the work for all, and all go
// on.
//
// Shuffles, matrix loads and multiplications order only their own operands between lanes. Only
// __syncwarp orders memory.
#pragma once
#include <cmath>

#include "block.h"

namespace simt::emulator {

template <class Work> SIMT_UNSEEN inline void meet(uint32_t mask, Collective what, Work work) {
  Thread& me = current();
  Warp& warp = block().warps[me.warp];
  if (!(mask >> me.lane & 1)) fail("a lane is not in its own mask");
  if ((mask & warp.alive) != mask) fail("a warp's collective names a lane that has ended");
  Meeting& meeting = warp.meetings[__builtin_ctz(mask)];
  if (meeting.arrived == 0) meeting.mask = mask, meeting.what = what;
  if (meeting.mask != mask || meeting.what != what) fail("a warp diverges in a collective");
  char* edge = &meeting.edge[meeting.turn & 1];
  if (what == Collective::kSync) happens_before(edge);
  meeting.arrived |= 1u << me.lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    meeting.turn++;
    work(warp);
    for (int l = 0; l < 32; l++)
      if ((mask >> l & 1) && l != me.lane) block().threads[me.warp * 32 + l].state = State::kReady;
  } else {
    me.state = State::kAtWarp;
    yield();
  }
  if (what == Collective::kSync) happens_after(edge);
}

SIMT_UNSEEN inline Slot& given() { return block().warps[current().warp].in[current().lane]; }
SIMT_UNSEEN inline Slot& result() { return block().warps[current().warp].out[current().lane]; }

// source: the lane that a lane reads, from its number and its argument.
template <class T, class Source> SIMT_UNSEEN inline T shuffle_values(uint32_t mask, T value, uint64_t argument, Source source) {
  static_assert(sizeof(T) <= 8);
  Slot& mine = given();
  mine.words[0] = 0;
  memcpy(&mine.words[0], &value, sizeof(T));
  mine.words[1] = argument;
  block().counters.shuffles++;
  meet(mask, Collective::kShuffle, [&](Warp& warp) SIMT_UNSEEN_CALL {
    for (int l = 0; l < 32; l++) {
      if (!(mask >> l & 1)) continue;
      const int from = source(l, warp.in[l].words[1]);
      if (!(mask >> from & 1)) fail("a shuffle reads a lane outside its mask");
      warp.out[l].words[0] = warp.in[from].words[0];
    }
  });
  T got;
  memcpy(&got, &result().words[0], sizeof(T));
  return got;
}

template <bool kTransposed> SIMT_UNSEEN inline void load(uint32_t (&r)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) & 15) fail("a row of a matrix load is not aligned to 16 bytes");
  given().words[0] = reinterpret_cast<uintptr_t>(row);
  block().counters.matrix_loads++;
  reads_16(row);
  meet(~0u, kTransposed ? Collective::kLoadTransposed : Collective::kLoad, [](Warp& warp) SIMT_UNSEEN_CALL {
    for (int matrix = 0; matrix < 4; matrix++)
      for (int l = 0; l < 32; l++) {
        uint16_t pair[2];
        for (int k = 0; k < 2; k++) {
          const int at = kTransposed ? (l % 4) * 2 + k : l / 4, column = kTransposed ? l / 4 : (l % 4) * 2 + k;
          pair[k] = reinterpret_cast<const uint16_t*>(warp.in[matrix * 8 + at].words[0])[column];
        }
        warp.out[l].words[matrix] = pair[0] | uint32_t(pair[1]) << 16;
      }
  });
  for (int matrix = 0; matrix < 4; matrix++) r[matrix] = uint32_t(result().words[matrix]);
}

SIMT_UNSEEN inline uint32_t transpose(uint32_t pair) {
  given().words[0] = pair;
  block().counters.shuffles++;
  meet(~0u, Collective::kTranspose, [](Warp& warp) SIMT_UNSEEN_CALL {
    const auto unit = [&](int row, int column) SIMT_UNSEEN_CALL { return uint32_t(warp.in[row * 4 + column / 2].words[0] >> 16 * (column % 2) & 0xFFFF); };
    for (int l = 0; l < 32; l++) warp.out[l].words[0] = unit(l % 4 * 2, l / 4) | unit(l % 4 * 2 + 1, l / 4) << 16;
  });
  return uint32_t(result().words[0]);
}

// exponent: all of its bits, for either half.
inline uint32_t without_infinities(uint32_t pair, uint32_t exponent) {
  for (const int by : {0, 16})
    if ((pair >> by & exponent) == exponent) pair |= 0x7FFFu << by;
  return pair;
}

// A bit for each lane.
SIMT_UNSEEN inline uint32_t vote(bool is_so) {
  given().words[0] = is_so;
  block().counters.shuffles++;
  meet(~0u, Collective::kVote, [](Warp& warp) SIMT_UNSEEN_CALL {
    uint64_t votes = 0;
    for (int l = 0; l < 32; l++) votes |= warp.in[l].words[0] << l;
    for (int l = 0; l < 32; l++) warp.out[l].words[0] = votes;
  });
  return uint32_t(result().words[0]);
}

SIMT_UNSEEN inline float float_of(uint16_t bits, __nv_bfloat16) {
  const uint32_t wide = uint32_t(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}
SIMT_UNSEEN inline float float_of(uint16_t bits, __half) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits >> 15 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(float(fraction), -24));
}

// PTX's mma.m16n8k16: lane l has the rows l / 4 and l / 4 + 8 of a. It has the column l / 4 of b,
// and two columns of those rows of c.
template <class T> SIMT_UNSEEN inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Slot& mine = given();
  memcpy(&mine.words[0], a, 16);
  mine.words[2] = b0 | uint64_t(b1) << 32;
  memcpy(&mine.words[3], c, 16);
  block().counters.multiplies++;
  meet(~0u, Collective::kMultiply, [](Warp& warp) SIMT_UNSEEN_CALL {
    float a[16][16], b[16][8], c[16][8];
    for (int l = 0; l < 32; l++) {
      const int row = l / 4, pair = 2 * (l % 4);
      uint16_t as[8], bs[4];
      float cs[4];
      memcpy(as, &warp.in[l].words[0], 16);
      memcpy(bs, &warp.in[l].words[2], 8);
      memcpy(cs, &warp.in[l].words[3], 16);
      for (int k = 0; k < 2; k++) {
        a[row][pair + k] = float_of(as[k], T()), a[row + 8][pair + k] = float_of(as[2 + k], T());
        a[row][pair + 8 + k] = float_of(as[4 + k], T()), a[row + 8][pair + 8 + k] = float_of(as[6 + k], T());
        b[pair + k][row] = float_of(bs[k], T()), b[pair + 8 + k][row] = float_of(bs[2 + k], T());
        c[row][pair + k] = cs[k], c[row + 8][pair + k] = cs[2 + k];
      }
    }
    for (int i = 0; i < 16; i++)
      for (int k = 0; k < 16; k++)
        for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (int l = 0; l < 32; l++) {
      const int row = l / 4, pair = 2 * (l % 4);
      const float cs[4] = {c[row][pair], c[row][pair + 1], c[row + 8][pair], c[row + 8][pair + 1]};
      memcpy(&warp.out[l].words[0], cs, 16);
    }
  });
  memcpy(c, &result().words[0], 16);
}

}  // namespace simt::emulator

template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32) {
  return simt::emulator::shuffle_values(mask, value, bits, [](int l, uint64_t bits) SIMT_UNSEEN_CALL { return l ^ int(bits); });
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int = 32) {
  return simt::emulator::shuffle_values(mask, value, from, [](int, uint64_t from) SIMT_UNSEEN_CALL { return int(from & 31); });
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, int by, int = 32) {
  return simt::emulator::shuffle_values(mask, value, by, [](int l, uint64_t by) SIMT_UNSEEN_CALL { return l >= int(by) ? l - int(by) : l; });
}
inline void __syncwarp(unsigned mask = ~0u) {
  simt::emulator::meet(mask, simt::emulator::Collective::kSync, [](simt::emulator::Warp&) SIMT_UNSEEN_CALL {});
}
inline uint32_t __ballot_sync(unsigned, bool is_so) { return simt::emulator::vote(is_so); }
inline int __popc(uint32_t word) { return __builtin_popcount(word); }
// A sum that other threads of the block raise too: no order of memory.
SIMT_UNSEEN inline void atomicAdd(uint32_t* number, uint32_t by) { *number += by; }
