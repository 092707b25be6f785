// Memory: physical handles and their mappings, plain allocations, and host pages for direct copies.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "state.hpp"

namespace fake {

Memory& memory() {
  static auto* only = new Memory;
  return *only;
}

Backing::~Backing() {
  close(fd);
  if (is_ours) memory().charged[prop.location.id] -= bytes;
}

namespace {

CUmemGenericAllocationHandle next_handle = 1;

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
bool is_there(size_t bytes, int device) { return memory().charged[device] + bytes <= number("TIERD_FAKE_CUDA_BYTES", size_t(8) << 30); }
bool overlaps(CUdeviceptr a, size_t bytes, CUdeviceptr b, size_t other) { return a < b + other && b < a + bytes; }

// The entry of a map of ranges that contains an address.
template <class Map> auto entry_at(Map& ranges, CUdeviceptr address) {
  auto next = ranges.upper_bound(address);
  return next == ranges.begin() ? ranges.end() : std::prev(next);
}
template <class Map, class Bytes> bool holds(Map& ranges, CUdeviceptr address, size_t bytes, Bytes bytes_of) {
  const auto found = entry_at(ranges, address);
  return found != ranges.end() && address + bytes <= found->first + bytes_of(found->second);
}

// Makes a reservation's addresses unmapped again.
bool reserve_again(CUdeviceptr address, size_t bytes) {
  return mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

// The mappings that exactly cover this range; none if it has a gap or cuts a mapping.
std::vector<std::map<CUdeviceptr, Mapping>::iterator> mappings_of(CUdeviceptr address, size_t bytes) {
  std::vector<std::map<CUdeviceptr, Mapping>::iterator> found;
  const CUdeviceptr end = address + bytes;
  while (address < end) {
    const auto next = memory().mappings.find(address);
    if (next == memory().mappings.end() || address + next->second.bytes > end) return {};
    found.push_back(next);
    address += next->second.bytes;
  }
  return found;
}

// New memory is not zero: no caller can rely on its content.
bool is_littered(int fd, size_t bytes) {
  const std::vector<char> litter(kGranularity, 'x');
  for (size_t at = 0; at < bytes; at += kGranularity)
    if (pwrite(fd, litter.data(), kGranularity, at) != ssize_t(kGranularity)) return false;
  return true;
}

CUresult location_error(const CUmemLocation& location) {
  if (location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  return is_device(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// The rights of host pages, from the kernel; an unmapped page has none.
int host_rights(CUdeviceptr address, size_t bytes) {
  FILE* maps = fopen("/proc/self/maps", "r");
  unsigned long begin, end;
  char rights[5];
  int all = PROT_READ | PROT_WRITE;
  while (bytes && fscanf(maps, "%lx-%lx %4s%*[^\n]", &begin, &end, rights) == 3) {
    if (address < begin || address >= end) continue;
    all &= (rights[0] == 'r' ? PROT_READ : 0) | (rights[1] == 'w' ? PROT_WRITE : 0);
    const size_t covered = std::min<size_t>(bytes, end - address);
    address += covered, bytes -= covered;
  }
  fclose(maps);
  return bytes ? 0 : all;
}

// Gives all device memory its mappings' rights, or none.
void protect(bool is_covered) {
  for (const auto& [address, mapping] : memory().mappings) mprotect(at(address), mapping.bytes, is_covered ? PROT_NONE : mapping.rights);
  for (const auto& [address, allocation] : memory().allocations) mprotect(at(address), allocation.bytes, is_covered ? PROT_NONE : PROT_READ | PROT_WRITE);
}

}  // namespace

Apart::Apart(int device) {
  if (!is_device(1)) return;
  for (const auto& [address, mapping] : memory().mappings)
    if (mapping.backing->prop.location.id != device) mprotect(at(address), mapping.bytes, PROT_NONE);
  for (const auto& [address, allocation] : memory().allocations)
    if (allocation.device != device) mprotect(at(address), allocation.bytes, PROT_NONE);
}
Apart::~Apart() {
  if (is_device(1)) protect(false);
}
Uncovered::Uncovered() { protect(false); }
Uncovered::~Uncovered() { protect(true); }

Range range_of(CUdeviceptr address, size_t bytes) {
  Memory& m = memory();
  if (holds(m.allocations, address, bytes, [](const Allocation& one) { return one.bytes; })) return {Place::kDevice, PROT_READ | PROT_WRITE};
  const auto pinned = entry_at(m.pinned, address);
  if (pinned != m.pinned.end() && address + bytes <= pinned->first + pinned->second.bytes)
    return {Place::kPinned, PROT_READ | (pinned->second.can_write ? PROT_WRITE : 0)};
  const auto reserved = entry_at(m.reservations, address);
  if (reserved == m.reservations.end() || address >= reserved->first + reserved->second) return {Place::kPageable, PROT_READ | PROT_WRITE};
  int rights = PROT_READ | PROT_WRITE;
  for (CUdeviceptr here = address; here < address + bytes;) {
    const auto found = entry_at(m.mappings, here);
    if (found == m.mappings.end() || here >= found->first + found->second.bytes) return {Place::kNone, 0};
    rights &= found->second.rights;
    here = found->first + found->second.bytes;
  }
  return {Place::kDevice, rights};
}

}  // namespace fake

using namespace fake;

// For the fake cuFile: whether a disk can write there. Memory of cuMemCreate must be made for it.
EXPORTED int fake_can_be_reached(CUdeviceptr address, size_t bytes) {
  std::lock_guard lock(fake::mutex());
  const Range range = range_of(address, bytes);
  if (range.place != Place::kDevice || !(range.rights & PROT_WRITE)) return 0;
  const auto found = entry_at(memory().mappings, address);
  const bool is_mapped = found != memory().mappings.end() && address < found->first + found->second.bytes;
  return !is_mapped || found->second.backing->prop.allocFlags.gpuDirectRDMACapable;
}

// Reads without waiting for work, with the mappings' rights: for the fake cuFile, and for tests
// that check the present bytes.
EXPORTED void fake_cuda_read(void* to, CUdeviceptr from, size_t bytes) {
  std::lock_guard lock(fake::mutex());
  const Uncovered uncovered;
  memcpy(to, at(from), bytes);
}
EXPORTED void fake_cuda_write(CUdeviceptr to, const void* from, size_t bytes) {
  std::lock_guard lock(fake::mutex());
  const Uncovered uncovered;
  memcpy(at(to), from, bytes);
}

// Of device memory alone: its device, kind and address.
EXPORTED CUresult cuPointerGetAttribute(void* to, CUpointer_attribute attribute, CUdeviceptr address) {
  ENTER_CONTEXT;
  if (range_of(address, 1).place != Place::kDevice) return CUDA_ERROR_INVALID_VALUE;
  const auto allocated = entry_at(memory().allocations, address);
  const bool is_plain = allocated != memory().allocations.end() && address < allocated->first + allocated->second.bytes;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *static_cast<int*>(to) = is_plain ? allocated->second.device : entry_at(memory().mappings, address)->second.backing->prop.location.id;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *static_cast<CUmemorytype*>(to) = CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr*>(to) = address;
  else
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** to, CUdeviceptr address) {
  for (unsigned i = 0; i < count; i++)
    if (CUresult wrong = cuPointerGetAttribute(to[i], attributes[i], address)) return wrong;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  ENTER_CONTEXT;
  const Range range = range_of(address, 1);
  if (range.place != Place::kDevice) return CUDA_ERROR_NOT_FOUND;
  const auto allocated = entry_at(memory().allocations, address);
  const bool is_plain = allocated != memory().allocations.end() && address < allocated->first + allocated->second.bytes;
  const auto mapped = entry_at(memory().mappings, address);
  *begin = is_plain ? allocated->first : mapped->first;
  *bytes = is_plain ? allocated->second.bytes : mapped->second.bytes;
  return CUDA_SUCCESS;
}

// -- physical memory, and its export to other processes

EXPORTED CUresult cuMemGetInfo(size_t* free, size_t* total) {
  ENTER_CONTEXT;
  *total = number("TIERD_FAKE_CUDA_BYTES", size_t(8) << 30);
  *free = *total - std::min(*total, memory().charged[current_device()]);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags) {
  ENTER;
  *bytes = kGranularity;
  return location_error(prop->location);
}
EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long flags) {
  ENTER;
  if (CUresult wrong = location_error(prop->location)) return wrong;
  if (!bytes || bytes % kGranularity || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->allocFlags.gpuDirectRDMACapable && is_left_out("rdma")) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_there(bytes, prop->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = memfd_create("tierd-fake-gpu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  auto backing = std::shared_ptr<Backing>(new Backing{fd, bytes, *prop, true});
  memory().charged[prop->location.id] += bytes;
  // An importer must know the device and the purpose. The file's mode has both, and any process can
  // read it.
  if (fchmod(fd, S_IRWXU | (prop->allocFlags.gpuDirectRDMACapable ? S_IRGRP : 0) | prop->location.id) || ftruncate(fd, bytes) || !is_littered(fd, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  memory().handles[*handle = next_handle++] = std::move(backing);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER;
  return memory().handles.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// Returns the handle of the mapping at an address once more; the caller releases it once more.
EXPORTED CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* from) {
  ENTER;
  const auto found = entry_at(memory().mappings, CUdeviceptr(from));
  if (found == memory().mappings.end() || CUdeviceptr(from) >= found->first + found->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  memory().handles[*handle = next_handle++] = found->second.backing;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemExportToShareableHandle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
  ENTER;
  const auto found = memory().handles.find(handle);
  if (found == memory().handles.end() || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  if (!(found->second->prop.requestedHandleTypes & type)) return CUDA_ERROR_INVALID_VALUE;  // it must be requested at creation
  const int fd = dup(found->second->fd);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(to) = fd;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType type) {
  ENTER;
  const int given = int(reinterpret_cast<intptr_t>(from));
  // The fake's memfds can be sealed, files and other memfds cannot. A name would need /proc, which
  // not every process may read.
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fcntl(given, F_GET_SEALS) != 0) return CUDA_ERROR_INVALID_VALUE;
  struct stat status;
  const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (fd < 0 || fstat(fd, &status)) return CUDA_ERROR_OPERATING_SYSTEM;
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, int(status.st_mode & S_IRWXO)};
  if (!is_device(prop.location.id)) return close(fd), CUDA_ERROR_INVALID_DEVICE;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.allocFlags.gpuDirectRDMACapable = !!(status.st_mode & S_IRGRP);
  memory().handles[*handle = next_handle++] = std::shared_ptr<Backing>(new Backing{fd, size_t(status.st_size), prop, false});
  return CUDA_SUCCESS;
}

// -- addresses

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* to, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long flags) {
  ENTER;
  if (!bytes || bytes % kGranularity || (alignment & (alignment - 1)) || flags) return CUDA_ERROR_INVALID_VALUE;
  const size_t aligned = std::max(alignment, kGranularity);
  void* space = mmap(nullptr, bytes + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUdeviceptr begin = CUdeviceptr(space), first = (begin + aligned - 1) / aligned * aligned;
  if (first > begin) munmap(space, first - begin);
  munmap(at(first + bytes), begin + aligned - first);
  memory().reservations[*to = first] = bytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  ENTER;
  const auto found = memory().reservations.find(address);
  if (found == memory().reservations.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [mapped, mapping] : memory().mappings)
    if (overlaps(address, bytes, mapped, mapping.bytes)) return CUDA_ERROR_INVALID_VALUE;
  munmap(at(address), bytes);
  memory().reservations.erase(found);
  return CUDA_SUCCESS;
}
// Maps a whole handle: cuda.h 13 forbids an offset and promises nothing for a part.
EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  ENTER;
  Memory& m = memory();
  const auto found = m.handles.find(handle);
  if (found == m.handles.end() || offset || flags || bytes != found->second->bytes || address % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  if (!holds(m.reservations, address, bytes, [](size_t length) { return length; })) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [mapped, mapping] : m.mappings)
    if (overlaps(address, bytes, mapped, mapping.bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, 0) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  m.mappings[address] = {bytes, found->second};
  return CUDA_SUCCESS;
}
// Unmaps whole mappings only, one or several adjacent ones. It waits for no work: later work at
// such an address loses the context.
EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  ENTER;
  const auto found = mappings_of(address, bytes);
  if (found.empty() || !reserve_again(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& mapping : found) memory().mappings.erase(mapping);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* rights, size_t count) {
  ENTER;
  const auto found = mappings_of(address, bytes);
  if (found.empty() || count != 1) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult wrong = location_error(rights->location)) return wrong;
  for (const auto& mapping : found)
    if (mapping->second.backing->prop.location.id != rights->location.id) return CUDA_ERROR_INVALID_DEVICE;  // no peers
  const std::map<unsigned, int> known = {{CU_MEM_ACCESS_FLAGS_PROT_NONE, PROT_NONE},
                                         {CU_MEM_ACCESS_FLAGS_PROT_READ, PROT_READ},
                                         {CU_MEM_ACCESS_FLAGS_PROT_READWRITE, PROT_READ | PROT_WRITE}};
  const auto asked = known.find(rights->flags);
  if (asked == known.end()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& mapping : found) mapping->second.rights = asked->second;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  ENTER;
  if (CUresult wrong = location_error(*location)) return wrong;
  const auto found = entry_at(memory().mappings, address);
  if (found == memory().mappings.end() || address >= found->first + found->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  const bool is_here = found->second.backing->prop.location.id == location->id;  // no peers
  const int rights = is_here ? found->second.rights : PROT_NONE;
  *flags = rights & PROT_WRITE ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : rights & PROT_READ ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

// -- plain allocations

EXPORTED CUresult cuMemAlloc(CUdeviceptr* to, size_t bytes) {
  ENTER_CONTEXT;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  const int device = current_device();
  if (!is_there(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
  void* space = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (space == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  memory().charged[device] += bytes;
  memory().allocations[*to = CUdeviceptr(space)] = {bytes, device};
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemFree(CUdeviceptr address) {
  ENTER_CONTEXT;
  const auto found = memory().allocations.find(address);
  if (found == memory().allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult wrong = finish_all()) return wrong;
  munmap(at(address), found->second.bytes);
  memory().charged[found->second.device] -= found->second.bytes;
  memory().allocations.erase(found);
  return CUDA_SUCCESS;
}

// -- the host's memory

EXPORTED CUresult cuMemHostRegister(void* from, size_t bytes, unsigned flags) {
  ENTER_CONTEXT;
  const auto address = CUdeviceptr(from);
  const bool is_read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
  if (!from || !bytes || flags & ~0xFu) return CUDA_ERROR_INVALID_VALUE;
  if (is_read_only && !number("TIERD_FAKE_CUDA_READ_ONLY_REGISTER", 1)) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto& [begin, pinned] : memory().pinned)
    if (overlaps(address, bytes, begin, pinned.bytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  const int needed = is_read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  if ((host_rights(address, bytes) & needed) != needed) return CUDA_ERROR_INVALID_VALUE;
  memory().pinned[address] = {bytes, !is_read_only, false};
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostUnregister(void* from) {
  ENTER_CONTEXT;
  const auto found = memory().pinned.find(CUdeviceptr(from));
  if (found == memory().pinned.end() || found->second.is_ours) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  if (CUresult wrong = finish_all()) return wrong;
  memory().pinned.erase(found);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostAlloc(void** to, size_t bytes, unsigned) {
  ENTER_CONTEXT;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  *to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (*to == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  memory().pinned[CUdeviceptr(*to)] = {bytes, true, true};
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemFreeHost(void* from) {
  ENTER_CONTEXT;
  const auto found = memory().pinned.find(CUdeviceptr(from));
  if (found == memory().pinned.end() || !found->second.is_ours) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult wrong = finish_all()) return wrong;
  munmap(from, found->second.bytes);
  memory().pinned.erase(found);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostGetDevicePointer(CUdeviceptr* to, void* from, unsigned flags) {
  ENTER_CONTEXT;
  *to = CUdeviceptr(from);
  return flags || range_of(*to, 1).place != Place::kPinned ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
