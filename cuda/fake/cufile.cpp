// NVIDIA's cuFile without a GPU: the part of libcufile.so.0 that tierd uses for reads. Structures
// and names are those of the cuFile API reference.
//
// TIERD_FAKE_CUFILE: with `nvfs` or `p2p` reads are direct, by nvidia-fs or by PCI P2PDMA. `wrong`:
// by nvidia-fs, with a wrong byte. `posix`: reads are not direct and only the counts show it, as
// with options that force it. With any other value it opens in compatibility mode or not at all.
// The fake driver owns the device memory and receives the bytes.
//
// TIERD_FAKE_CUFILE_ORDERS: a file that each read checks. Its text `error`, `eio`, `short`,
// `wrong`, `crash` or `hang` is the read's outcome. A read that hangs creates a file *.held.
// TIERD_FAKE_CUFILE_COUNTS: each read that has ended writes the counts so far, by nvidia-fs, P2PDMA
// and POSIX, and their bytes.
//
// It is as strict as the reference permits. A caller must register whole device memory that is made
// for GPUDirect RDMA and still mapped. Files must be open, with O_DIRECT. A handle that is given
// back must be known, and no read of it may run. A caller that breaks the last rule is ended, since
// no error reports it.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum OpError { kSuccess = 0, kNotInitialized = 5001, kIoNotSupported = 5008, kNvfsError = 5010, kMemoryTypeInvalid = 5013, kInvalidValue = 5022, kAlreadyRegistered = 5023 };
struct Error {
  OpError err;
  int cu_err;
};
struct Descr {
  int type;  // 1: a file descriptor
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops;
};
struct PerGpu {
  char uuid[16];
  uint64_t read_bytes, read_bw, read_utilization, read_duration_us, n_total_reads, n_p2p_reads, n_nvfs_reads, n_posix_reads, others[21];
};
struct StatsLevel3 {
  char detailed[1136];
  uint32_t num_gpus;
  PerGpu per_gpu[16];
};
static_assert(sizeof(StatsLevel3) == 5112 && sizeof(PerGpu) == 248);
constexpr int kAllowCompatMode = 1, kVerbose = 3;

constexpr size_t kPage = 4096;

struct File {
  int fd;
  dev_t device;
  ino_t inode;
  int reads = 0;
};
struct Buffer {
  size_t bytes;
  int reads = 0;
};

std::mutex turn;
bool is_open = false, is_counting = false, may_detour = true;
int level = 0;
PerGpu counted{};
std::map<uintptr_t, File> files;  // numbers are never used twice
uintptr_t next_file = 1;
std::map<const void*, Buffer> buffers;

std::string way() {
  const char* given = getenv("TIERD_FAKE_CUFILE");
  return given ? given : "";
}
bool is_direct() { return way() == "nvfs" || way() == "p2p" || way() == "wrong"; }
Error answer(bool is_right, OpError otherwise) { return {is_right ? kSuccess : otherwise, 0}; }

[[noreturn]] void broken(const char* what) {
  fprintf(stderr, "fake cuFile: %s\n", what);
  abort();
}
// Whether the file is still the one that was registered.
bool is_there(const File& file) {
  struct stat now;
  return !fstat(file.fd, &now) && now.st_dev == file.device && now.st_ino == file.inode;
}
// A function of the fake driver.
template <class Function> Function* driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return driver ? reinterpret_cast<Function*>(dlsym(driver, name)) : nullptr;
}
// Whether the fake driver has device memory there that a disk can write to.
bool can_reach(const void* address, size_t bytes) {
  static auto* ask = driver_function<int(uintptr_t, size_t)>("fake_can_be_reached");
  return ask && ask(uintptr_t(address), bytes);
}
std::string order() {
  const char* path = getenv("TIERD_FAKE_CUFILE_ORDERS");
  std::string word;
  if (path) std::ifstream(path) >> word;
  return word;
}
void tell_counts() {
  if (const char* path = getenv("TIERD_FAKE_CUFILE_COUNTS"))
    std::ofstream(path) << counted.n_total_reads << ' ' << counted.n_nvfs_reads << ' ' << counted.n_p2p_reads << ' ' << counted.n_posix_reads << ' ' << counted.read_bytes << '\n';
}
// The disk's bytes, or the ordered outcome.
ssize_t carried(const File& file, char* to, size_t bytes, off_t at) {
  if (order() == "hang") std::ofstream(getenv("TIERD_FAKE_CUFILE_ORDERS") + std::string(".held"));
  while (order() == "hang") usleep(10000);
  const std::string word = order();
  if (word == "crash") raise(SIGSEGV);
  if (word == "error") return -kNvfsError;
  if (word == "eio") return errno = EIO, -1;
  if (word == "short") bytes = bytes / 2 / kPage * kPage;
  const std::unique_ptr<char, decltype(&free)> room(static_cast<char*>(aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage)), free);
  const ssize_t got = pread(file.fd, room.get(), bytes, at);
  if (got <= 0) return got;
  if (way() == "wrong" || word == "wrong") room.get()[got / 2] ^= 1;
  static auto* receive = driver_function<void(uintptr_t, const void*, size_t)>("fake_cuda_write");
  receive(uintptr_t(to), room.get(), got);
  return got;
}

}  // namespace

EXPORTED Error cuFileSetParameterBool(int parameter, bool value) {
  std::lock_guard lock(turn);
  if (is_open || parameter != kAllowCompatMode) return {kInvalidValue, 0};  // an open driver's properties are fixed
  may_detour = value;
  return {kSuccess, 0};
}
EXPORTED Error cuFileDriverOpen() {
  std::lock_guard lock(turn);
  is_open = is_direct() || way() == "posix" || may_detour;
  return answer(is_open, kNotInitialized);
}
EXPORTED Error cuFileDriverClose_v2() {
  std::lock_guard lock(turn);
  const bool was = is_open && files.empty() && buffers.empty();
  is_open = false;
  return answer(was, kNotInitialized);
}
EXPORTED Error cuFileSetStatsLevel(int wanted) {
  std::lock_guard lock(turn);
  level = wanted;
  return answer(is_open && wanted >= 0 && wanted <= kVerbose, kInvalidValue);
}
EXPORTED Error cuFileStatsStart() {
  std::lock_guard lock(turn);
  is_counting = is_open && level == kVerbose;
  return answer(is_counting, kInvalidValue);
}
// kvikio looks for these when it begins, and tierd's reads call none of them.
#define REFUSED(name) \
  EXPORTED Error name() { return {kIoNotSupported, 0}; }
REFUSED(cuFileDriverClose)
REFUSED(cuFileDriverGetProperties)
REFUSED(cuFileDriverSetPollMode)
REFUSED(cuFileDriverSetMaxCacheSize)
REFUSED(cuFileDriverSetMaxPinnedMemSize)
REFUSED(cuFileGetVersion)
REFUSED(cuFileWrite)
REFUSED(cuFileBatchIOSetUp)
REFUSED(cuFileBatchIOSubmit)
REFUSED(cuFileBatchIOGetStatus)
REFUSED(cuFileBatchIOCancel)
REFUSED(cuFileBatchIODestroy)
REFUSED(cuFileReadAsync)
REFUSED(cuFileWriteAsync)
REFUSED(cuFileStreamRegister)
REFUSED(cuFileStreamDeregister)
EXPORTED Error cuFileGetStatsL3(StatsLevel3* to) {
  std::lock_guard lock(turn);
  if (!is_counting) return {kInvalidValue, 0};
  memset(to, 0, sizeof *to);
  to->num_gpus = 1;
  to->per_gpu[0] = counted;
  return {kSuccess, 0};
}
EXPORTED Error cuFileHandleRegister(void** handle, const Descr* given) {
  std::lock_guard lock(turn);
  struct stat now;
  if (!is_open || given->type != 1 || given->fs_ops || fstat(given->handle.fd, &now)) return {kInvalidValue, 0};
  if (is_direct() && !(fcntl(given->handle.fd, F_GETFL) & O_DIRECT)) return {kIoNotSupported, 0};
  files[next_file] = {given->handle.fd, now.st_dev, now.st_ino};
  *handle = reinterpret_cast<void*>(next_file++);
  return {kSuccess, 0};
}
EXPORTED void cuFileHandleDeregister(void* handle) {
  std::lock_guard lock(turn);
  const auto file = files.find(uintptr_t(handle));
  if (file == files.end()) broken("a file is given back that is not registered");
  if (file->second.reads) broken("a file is given back under a read");
  if (!is_there(file->second)) broken("a descriptor was closed before its file was given back");
  files.erase(file);
}
EXPORTED Error cuFileBufRegister(const void* buffer, size_t bytes, int flags) {
  std::lock_guard lock(turn);
  if (!is_open || flags || !bytes) return {kInvalidValue, 0};
  if (is_direct() && !can_reach(buffer, bytes)) return {kMemoryTypeInvalid, 0};
  const auto next = buffers.lower_bound(buffer);
  if (next != buffers.end() && next->first < static_cast<const char*>(buffer) + bytes) return {kAlreadyRegistered, 0};
  if (next != buffers.begin() && static_cast<const char*>(std::prev(next)->first) + std::prev(next)->second.bytes > buffer) return {kAlreadyRegistered, 0};
  buffers[buffer] = {bytes};
  return {kSuccess, 0};
}
EXPORTED Error cuFileBufDeregister(const void* buffer) {
  std::lock_guard lock(turn);
  const auto found = buffers.find(buffer);
  if (found == buffers.end()) return {kInvalidValue, 0};
  if (found->second.reads) broken("memory is given back under a read");
  if (is_direct() && !can_reach(buffer, found->second.bytes)) broken("memory was unmapped before it was given back");
  buffers.erase(found);
  return {kSuccess, 0};
}
EXPORTED ssize_t cuFileRead(void* handle, void* buffer, size_t bytes, off_t at, off_t offset) {
  std::unique_lock lock(turn);
  const auto file = files.find(uintptr_t(handle));
  const auto memory = buffers.find(buffer);
  if (file == files.end() || memory == buffers.end() || at < 0 || offset < 0 || offset + bytes > memory->second.bytes) return -kInvalidValue;
  if (is_direct() && (bytes % kPage || at % kPage || offset % kPage)) return -kIoNotSupported;
  if (!is_there(file->second)) broken("a descriptor was closed under its registered file");
  if (is_direct() && !can_reach(buffer, memory->second.bytes)) broken("memory was unmapped while it was registered");
  file->second.reads++, memory->second.reads++;
  lock.unlock();
  const ssize_t got = carried(file->second, static_cast<char*>(buffer) + offset, bytes, at);
  const int wrong = errno;
  lock.lock();
  file->second.reads--, memory->second.reads--;
  counted.n_total_reads++, counted.read_bytes += got > 0 ? got : 0;
  (way() == "p2p" ? counted.n_p2p_reads : is_direct() ? counted.n_nvfs_reads : counted.n_posix_reads)++;
  tell_counts();
  errno = wrong;
  return got;
}
