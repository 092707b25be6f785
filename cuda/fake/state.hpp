// The fake driver's state: devices in this process's memory, and work that waits as long as it may.
//
// For host code alone: NVIDIA's own bindings run on it, unmodified, without a GPU. It checks its
// callers as the driver does, and uses every delay that the driver may. Work in a stream runs only
// when a caller waits for it, so that a missing wait shows. Device memory is a memfd for each
// allocation, so that exported memory outlives the process. As a GPU's, it is out of the host's
// reach except while work runs: a host access ends in SIGSEGV.
// Contexts are separate as the driver's are. A function and a stream belong to one context, and a
// launch under another is refused. Stream 0 is the current context's: a wait for one device does
// not wait for another. A kernel reaches its own device's memory alone. Differences: a kernel can
// read the host's memory, and no two pieces of work ever run at the same time.
// TIERD_FAKE_CUDA_DEVICES: number of devices. No two are peers. TIERD_FAKE_CUDA_HANGS=1: kernels do
// not end while it is set.
#pragma once
#include <cuda.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Calls take turns. A forked child of a process that used the driver gets an error, as with the
// real one.
#define ENTER                                                                \
  std::lock_guard lock(fake::mutex());                                       \
  if (CUresult wrong = fake::strike(__func__)) return wrong;                 \
  if (!fake::is_initialized()) return CUDA_ERROR_NOT_INITIALIZED
// After a device error every call that needs the context returns it again.
#define ENTER_CONTEXT                               \
  ENTER;                                            \
  if (CUresult wrong = fake::context_error()) return wrong

namespace fake {

constexpr size_t kGranularity = 2 << 20;
constexpr int kDevices = 8;  // at most
constexpr int kMultiprocessors = 132, kThreads = 2048, kShared = 228 << 10, kBlockShared = 227 << 10, kPlainShared = 48 << 10;

std::recursive_mutex& mutex();
bool is_initialized();
bool is_device(int number);
int current_device();  // the current context's, else 0
CUresult context_error();
int device_of(CUcontext context);  // -1: the context is not retained
void lose_context(int device, CUresult error);
size_t number(const char* variable, size_t otherwise);
// Shared memory that a thread block may have: less than an H100's with
// TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES.
inline int block_shared() { return int(number("TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES", kBlockShared)); }
// TIERD_FAKE_CUDA_STRIKE, <function or *>:<which of its calls, from 1; 0: each>:<number of a
// signal, or e and that of an error>[:<device>]: the outcome of such a call. With a device: only if
// that device's context is current.
CUresult strike(const char* function);
// TIERD_FAKE_CUDA_WITHOUT: a function that this driver lacks, or a feature. `descriptors`; `vmm`:
// memory management by addresses; `host pointers` for kernels; `rdma`: memory that other devices
// reach.
bool is_left_out(const char* name);

// -- memory

// Physical memory. It is freed when no handle and no mapping refers to it, here or in an importing
// process.
struct Backing {
  int fd;
  size_t bytes;
  CUmemAllocationProp prop;
  bool is_ours;  // charged to this process; an imported one is charged to the process that made it
  ~Backing();
};
struct Mapping {
  size_t bytes;
  std::shared_ptr<Backing> backing;
  int rights = 0;  // PROT_READ, PROT_WRITE; none until cuMemSetAccess
};
struct Pinned {
  size_t bytes;
  bool can_write, is_ours;  // ours: from cuMemHostAlloc
};
struct Allocation {
  size_t bytes;
  int device;
};
struct Memory {
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Backing>> handles;
  std::map<CUdeviceptr, size_t> reservations;  // from cuMemAddressReserve
  std::map<CUdeviceptr, Allocation> allocations;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUdeviceptr, Pinned> pinned;
  size_t charged[kDevices] = {};
};
Memory& memory();

enum class Place { kDevice, kPinned, kPageable, kNone };  // none: reserved or partly mapped; no copy may touch it
struct Range {
  Place place;
  int rights;
};
Range range_of(CUdeviceptr at, size_t bytes);
// While it lives device memory is accessible with its mappings' rights. One at a time, in the
// driver's turn.
struct Uncovered {
  Uncovered();
  ~Uncovered();
};
// While a kernel of a device runs, it makes other devices' memory inaccessible.
struct Apart {
  explicit Apart(int device);
  ~Apart();
};

// -- work

// A piece of work and its predecessors: its stream's earlier work, and events that the stream waits
// for.
struct Work {
  std::vector<std::shared_ptr<Work>> before;
  std::function<CUresult()> run;
  int device = 0;
  bool is_done = false, was_asked = false, is_kernel = false;
  std::chrono::steady_clock::time_point ended;
};
// The work that a stream got while it was captured.
struct Graph {
  std::vector<std::function<CUresult()>> steps;
};
struct Stream {
  int device;
  bool is_blocking;  // it and the legacy stream wait for each other
  std::shared_ptr<Work> last;
  std::unique_ptr<Graph> captured = nullptr;  // during a capture; no caller may wait for the stream then
};
Stream* find_stream(CUstream handle);
std::shared_ptr<Work> enqueue(Stream& stream, std::function<CUresult()> run);
CUresult finish(const std::shared_ptr<Work>& work);
CUresult finish_all(int device = -1);  // -1: all
void forget_work(int device);

// Runs work that may touch missing memory or lack its rights: a signal becomes
// CUDA_ERROR_ILLEGAL_ADDRESS.
CUresult guarded(const std::function<CUresult()>& run);

struct Counts {
  uint64_t handles, mappings, reservations, allocations, pinned, streams, events, libraries, pending, charged_bytes;
};
void count_work(Counts& counts);
void count_libraries(Counts& counts);

}  // namespace fake
