// Asynchronous copies, as late as possible: the target is poisoned at once, and the bytes arrive
// only when their group is awaited.
#pragma once
#include "block.h"

namespace simt {

SIMT_UNSEEN inline void copy_async(void* to, const void* from, bool is_there) {
  using namespace emulator;
  Block& b = block();
  auto* const at = static_cast<unsigned char*>(to);
  if ((reinterpret_cast<uintptr_t>(to) | (is_there ? reinterpret_cast<uintptr_t>(from) : 0)) & 15) fail("a copy is not aligned to 16 bytes");
  if (at < b.shared || at + 16 > b.shared + b.shared_bytes) fail("a copy goes outside shared memory");
  writes_16(to);  // it may arrive any time from here on
  memset(to, 0xFF, 16);
  Copies& copies = current().copies;
  if (copies.begun - copies.landed == Copies::kMost) fail("more copies under way than the emulator keeps");
  copies.queue[copies.begun++ % Copies::kMost] = {to, from, is_there};
  b.counters.copied_bytes += is_there ? 16 : 0;
}

SIMT_UNSEEN inline void commit_copies() {
  auto& copies = emulator::current().copies;
  if (copies.groups - copies.groups_landed == emulator::Copies::kMostGroups) emulator::fail("more groups of copies than the emulator keeps");
  copies.group_ends[copies.groups++ % emulator::Copies::kMostGroups] = copies.begun;
}

SIMT_UNSEEN inline void land(const emulator::Copy& copy) {
  if (copy.is_there) emulator::reads_16(copy.from);
  emulator::writes_16(copy.to);
#if SIMT_ASAN
  if (copy.is_there && __asan_region_is_poisoned(const_cast<void*>(copy.from), 16)) emulator::fail("a copy reads out of bounds");
#endif
  if (copy.is_there) memcpy(copy.to, copy.from, 16);
  else memset(copy.to, 0, 16);
}

template <int N> SIMT_UNSEEN inline void await_copies() {
  auto& copies = emulator::current().copies;
  while (copies.groups - copies.groups_landed > uint32_t(N)) {
    const uint32_t end = copies.group_ends[copies.groups_landed++ % emulator::Copies::kMostGroups];
    while (copies.landed != end) land(copies.queue[copies.landed++ % emulator::Copies::kMost]);
  }
}

}  // namespace simt
