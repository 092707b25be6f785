// Runs one thread block at a time: its threads take turns until each has ended or waits at a
// barrier.
//
// SIMT_ORDER is the order of turns and of blocks: 0 forward, 1 reverse, from 2 on shuffled by that
// seed. Shared memory has exactly the requested size and begins as NaN. The process ends with
// status 97 and the place of a fault. Faults: a barrier that not all threads reach, a divergent
// collective, a copy that no thread awaits.
#pragma once
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "fiber.h"

namespace simt::emulator {

struct Dim {
  unsigned x, y, z;
};
enum class State : uint8_t { kReady, kAtWarp, kAtBarrier, kEnded };
enum class Collective : uint8_t { kNone, kShuffle, kVote, kSync, kLoad, kLoadTransposed, kTranspose, kMultiply };

struct Copy {
  void* to;
  const void* from;
  bool is_there;
};
// The asynchronous copies of a thread, and the ends of its committed groups: rings, whose counters
// only rise.
struct Copies {
  static constexpr uint32_t kMost = 512, kMostGroups = 16;
  Copy queue[kMost];
  uint32_t group_ends[kMostGroups];
  uint32_t begun = 0, landed = 0, groups = 0, groups_landed = 0;
};

struct Thread : Context {
  State state = State::kEnded;
  Dim index{};
  int lane = 0, warp = 0;
  unsigned barriers = 0;
  Copies copies;
};

struct Slot {
  uint64_t words[8];
};
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  Collective what = Collective::kNone;
  unsigned turn = 0;
  char edge[2] = {0, 0};
};
struct Warp {
  Slot in[32], out[32];
  Meeting meetings[32];  // by the lowest lane of the mask
  uint32_t alive = 0;
};

struct Counters {
  uint64_t switches, shuffles, multiplies, matrix_loads, copied_bytes, barriers;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Dim index{}, size{}, grid{};
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  int live = 0, at_barrier = 0;
  char barrier_edge[2] = {0, 0}, begin_edge = 0, end_edge = 0;
  std::function<void()> body;
  Thread* current = nullptr;
  Context scheduler;
  uint64_t random = 1;
  int order = 0;
  Counters counters{};
};

inline Block& block() {
  static Block only;
  return only;
}
inline Thread& current() { return *block().current; }

[[noreturn]] inline void fail(const char* what) {
  const Block& b = block();
  fprintf(stderr, "simt: %s (block %u,%u,%u thread %u)\n", what, b.index.x, b.index.y, b.index.z, b.current ? b.current->index.x : ~0u);
  fflush(stderr);
  _Exit(97);
}

SIMT_UNSEEN inline void yield() { switch_to(current(), block().scheduler); }

SIMT_UNSEEN inline void thread_entry() {
  Block& b = block();
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &b.scheduler.stack_bottom, &b.scheduler.stack_bytes);
#endif
  happens_after(&b.begin_edge);
  b.body();
  Thread& me = current();
  if (me.copies.landed != me.copies.begun) fail("a thread ended with copies under way");
  me.state = State::kEnded;
  b.live--;
  b.warps[me.warp].alive &= ~(1u << me.lane);
  happens_before(&b.end_edge);  // a later launch may move the warps
  switch_to(me, b.scheduler, true);
  abort();
}

SIMT_UNSEEN inline void resume(Thread& thread) {
  Block& b = block();
  b.current = &thread;
  b.counters.switches++;
  switch_to(b.scheduler, thread);
  b.current = nullptr;
}

SIMT_UNSEEN inline void open_barrier() {
  Block& b = block();
  if (!b.live || b.at_barrier != b.live) return;
  b.at_barrier = 0;
  b.counters.barriers++;
  for (Thread& thread : b.threads)
    if (thread.state == State::kAtBarrier) thread.state = State::kReady;
}

SIMT_UNSEEN inline uint64_t next_random() {
  uint64_t& x = block().random;
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

SIMT_UNSEEN inline void shuffle(std::vector<int>& turns) {
  const int order = block().order;
  if (order == 1) std::reverse(turns.begin(), turns.end());
  if (order < 2) return;
  for (size_t i = turns.size(); i > 1; i--) std::swap(turns[i - 1], turns[next_random() % i]);
}

SIMT_UNSEEN inline void begin_threads(int count) {
  Block& b = block();
  b.threads.resize(count);
  b.warps.assign((count + 31) / 32, Warp());
  b.live = count;
  b.at_barrier = 0;
  for (int i = 0; i < count; i++) {
    Thread& thread = b.threads[i];
    thread.begin(thread_entry);
    thread.index = {unsigned(i), 0, 0};
    thread.lane = i & 31;
    thread.warp = i >> 5;
    thread.state = State::kReady;
    thread.barriers = 0;
    thread.copies.begun = thread.copies.landed = thread.copies.groups = thread.copies.groups_landed = 0;
    b.warps[thread.warp].alive |= 1u << thread.lane;
  }
}

SIMT_UNSEEN inline void run_block() {
  Block& b = block();
  begin_threads(b.size.x);
  std::vector<int> turns(b.size.x);
  for (size_t i = 0; i < turns.size(); i++) turns[i] = int(i);
  while (b.live) {
    std::vector<int> now = turns;
    shuffle(now);
    bool ran = false;
    for (int i : now) {
      if (b.threads[i].state != State::kReady) continue;
      ran = true;
      resume(b.threads[i]);
    }
    const int live = b.live;
    open_barrier();
    const bool is_any_ready = std::any_of(b.threads.begin(), b.threads.end(), [](const Thread& t) { return t.state == State::kReady; });
    if (!ran && live && !is_any_ready) fail("deadlock: not all threads reach a barrier or a collective");
  }
}

template <class Body> SIMT_UNSEEN void launch(Dim grid, unsigned threads, size_t shared_bytes, Body body) {
  Block& b = block();
  const char* order = getenv("SIMT_ORDER");
  b.grid = grid;
  b.size = {threads, 1, 1};
  b.body = body;
  b.order = order ? atoi(order) : 0;
  b.random = 0x9E3779B97F4A7C15ull * (b.order + 1);
#if SIMT_TSAN
  b.scheduler.tsan = __tsan_get_current_fiber();
#endif
  happens_before(&b.begin_edge);
  std::vector<int> columns(grid.x);
  for (unsigned x = 0; x < grid.x; x++) columns[x] = int(x);
  shuffle(columns);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (const int x : columns) {
        b.index = {unsigned(x), y, z};
        b.shared_bytes = shared_bytes;
        b.shared = static_cast<unsigned char*>(aligned_alloc(128, std::max<size_t>(128, (shared_bytes + 127) / 128 * 128)));
#if SIMT_ASAN
        if (shared_bytes % 128) __asan_poison_memory_region(b.shared + shared_bytes, 128 - shared_bytes % 128);
#endif
        memset(b.shared, 0xFF, shared_bytes);
        run_block();
#if SIMT_ASAN
        if (shared_bytes % 128) __asan_unpoison_memory_region(b.shared + shared_bytes, 128 - shared_bytes % 128);
#endif
        retired().push_back(b.shared);
      }
  happens_after(&b.end_edge);
  free_retired();
}

}  // namespace simt::emulator

SIMT_UNSEEN inline void __syncthreads() {
  auto& b = simt::emulator::block();
  char* edge = &b.barrier_edge[simt::emulator::current().barriers++ & 1];
  simt::emulator::happens_before(edge);
  b.at_barrier++;
  simt::emulator::current().state = simt::emulator::State::kAtBarrier;
  simt::emulator::yield();
  simt::emulator::happens_after(edge);
}
