// NVIDIA's cuFile without a GPU: libcufile.so.0, as far as it tells whether a read was direct. Structures and names are those of the cuFile API reference.
//
// TIERD_FAKE_CUFILE: `nvfs` or `p2p`: reads are direct, by nvidia-fs or by PCI P2PDMA; `wrong`: by nvidia-fs, and a byte differs; `posix`: they are not and cuFile does not say so but in its counts, as
// with options that force it; anything else: nothing is there for it, so it opens in compatibility mode or not at all. Device memory is the fake driver's,
// which can be read into as the host's.
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum OpError { kSuccess = 0, kNotInitialized = 5001, kIoNotSupported = 5008, kInvalidValue = 5022 };
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

bool is_open = false, is_counting = false, may_detour = true;
int level = 0;
PerGpu counted{};
std::map<void*, int> files;
std::map<const void*, size_t> buffers;

std::string way() {
  const char* given = getenv("TIERD_FAKE_CUFILE");
  return given ? given : "";
}
bool is_direct() { return way() == "nvfs" || way() == "p2p" || way() == "wrong"; }
Error answer(bool is_right, OpError otherwise) { return {is_right ? kSuccess : otherwise, 0}; }

}  // namespace

EXPORTED Error cuFileSetParameterBool(int parameter, bool value) {
  if (is_open || parameter != kAllowCompatMode) return {kInvalidValue, 0};  // properties are the driver's once it is open
  may_detour = value;
  return {kSuccess, 0};
}
EXPORTED Error cuFileDriverOpen() {
  is_open = is_direct() || way() == "posix" || may_detour;
  return answer(is_open, kNotInitialized);
}
EXPORTED Error cuFileDriverClose_v2() {
  const bool was = is_open && files.empty() && buffers.empty();
  is_open = false;
  return answer(was, kNotInitialized);
}
EXPORTED Error cuFileSetStatsLevel(int wanted) {
  level = wanted;
  return answer(is_open && wanted >= 0 && wanted <= kVerbose, kInvalidValue);
}
EXPORTED Error cuFileStatsStart() {
  is_counting = is_open && level == kVerbose;
  return answer(is_counting, kInvalidValue);
}
EXPORTED Error cuFileGetStatsL3(StatsLevel3* to) {
  if (!is_counting) return {kInvalidValue, 0};
  memset(to, 0, sizeof *to);
  to->num_gpus = 1;
  to->per_gpu[0] = counted;
  return {kSuccess, 0};
}
EXPORTED Error cuFileHandleRegister(void** handle, const Descr* given) {
  if (!is_open || given->type != 1 || given->fs_ops) return {kInvalidValue, 0};
  if (is_direct() && !(fcntl(given->handle.fd, F_GETFL) & O_DIRECT)) return {kIoNotSupported, 0};
  *handle = malloc(1);
  files[*handle] = given->handle.fd;
  return {kSuccess, 0};
}
EXPORTED void cuFileHandleDeregister(void* handle) {
  files.erase(handle);
  free(handle);
}
EXPORTED Error cuFileBufRegister(const void* buffer, size_t bytes, int flags) {
  if (!is_open || flags || !bytes || buffers.count(buffer)) return {kInvalidValue, 0};
  buffers[buffer] = bytes;
  return {kSuccess, 0};
}
EXPORTED Error cuFileBufDeregister(const void* buffer) { return answer(buffers.erase(buffer), kInvalidValue); }
EXPORTED ssize_t cuFileRead(void* handle, void* buffer, size_t bytes, off_t at, off_t offset) {
  const auto file = files.find(handle);
  if (file == files.end() || !buffers.count(buffer) || offset + bytes > buffers[buffer]) return -kInvalidValue;
  if (is_direct() && (bytes % 4096 || at % 4096)) return -kIoNotSupported;
  const ssize_t got = pread(file->second, static_cast<char*>(buffer) + offset, bytes, at);
  if (way() == "wrong") static_cast<char*>(buffer)[offset + bytes / 2] ^= 1;
  counted.n_total_reads++;
  (way() == "p2p" ? counted.n_p2p_reads : is_direct() ? counted.n_nvfs_reads : counted.n_posix_reads)++;
  return got;
}
