// What the fake driver knows: devices that are this process's memory, and work that waits as long as it may.
//
// For host code alone: NVIDIA's own bindings run on it, unmodified, where there is no GPU. It checks its callers as the driver does, and is as unkind as
// the driver may be: work put into a stream runs when somebody waits for it, not before, so that a wait that is missing is seen. Device memory is a memfd
// for each allocation, so that what is exported lives on in other processes. It is out of the host's reach, as a GPU's, but while work runs: who takes its address for one of
// the host's ends by SIGSEGV. Contexts are apart as the driver's are: a function and a stream are one context's, and a launch while another is current is refused; stream 0 is the
// current context's, so that who waits for one device does not wait for work that went to another; a kernel reaches its own device's memory alone. What it is not like: a kernel may read
// the host's memory; and no two pieces of work are ever under way at the same time. TIERD_FAKE_CUDA_DEVICES: how many there are. No two are peers.
// TIERD_FAKE_CUDA_HANGS=1: kernels never end, for as long as it is set.
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

// Calls take turns. A child of a process that has used the driver gets no further, as with the real one.
#define ENTER                                                                \
  std::lock_guard lock(fake::mutex());                                       \
  if (CUresult wrong = fake::strike(__func__)) return wrong;                 \
  if (!fake::is_initialized()) return CUDA_ERROR_NOT_INITIALIZED
// After an error of the device's, every call that needs the context gives it again.
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
int current_device();  // that of the current context, else 0
CUresult context_error();
int device_of(CUcontext context);  // -1: of none that is retained
void lose_context(int device, CUresult error);
size_t number(const char* variable, size_t otherwise);
// Of shared memory that a thread block may have: less than an H100's for TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES.
inline int block_shared() { return int(number("TIERD_FAKE_CUDA_BLOCK_SHARED_BYTES", kBlockShared)); }
// TIERD_FAKE_CUDA_STRIKE, <function or *>:<which of its calls, from 1; 0: each>:<number of a signal, or e and that of an error>[:<device>]: what such a call meets with,
// if there is a device, where that one's context is current.
CUresult strike(const char* function);
// TIERD_FAKE_CUDA_WITHOUT: a function that this driver has not, or `descriptors`, or `vmm`: memory management by addresses, or `host pointers` that kernels may use,
// or `rdma`: memory of it that other devices reach.
bool is_left_out(const char* name);

// -- memory

// Physical memory. It is given back when neither a handle nor a mapping refers to it, here or in a process that it was exported to.
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
  bool can_write, is_ours;  // ours: of cuMemHostAlloc
};
struct Allocation {
  size_t bytes;
  int device;
};
struct Memory {
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Backing>> handles;
  std::map<CUdeviceptr, size_t> reservations;  // of cuMemAddressReserve
  std::map<CUdeviceptr, Allocation> allocations;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUdeviceptr, Pinned> pinned;
  size_t charged[kDevices] = {};
};
Memory& memory();

enum class Place { kDevice, kPinned, kPageable, kNone };  // none: reserved or in part mapped, so that no copy may touch it
struct Range {
  Place place;
  int rights;
};
Range range_of(CUdeviceptr at, size_t bytes);
// While it lives device memory can be touched, with the rights of its mappings. One at a time, in the driver's turn.
struct Uncovered {
  Uncovered();
  ~Uncovered();
};
// While a kernel of a device runs: what lies on others is out of its reach.
struct Apart {
  explicit Apart(int device);
  ~Apart();
};

// -- work

// A piece of work and what must have ended before it: its stream's earlier work, events that the stream waits for.
struct Work {
  std::vector<std::shared_ptr<Work>> before;
  std::function<CUresult()> run;
  int device = 0;
  bool is_done = false, was_asked = false, is_kernel = false;
  std::chrono::steady_clock::time_point ended;
};
// What a stream was given while it was captured.
struct Graph {
  std::vector<std::function<CUresult()>> steps;
};
struct Stream {
  int device;
  bool is_blocking;  // it and the legacy stream wait for each other
  std::shared_ptr<Work> last;
  std::unique_ptr<Graph> captured = nullptr;  // while it is; nobody may wait for it then
};
Stream* find_stream(CUstream handle);
std::shared_ptr<Work> enqueue(Stream& stream, std::function<CUresult()> run);
CUresult finish(const std::shared_ptr<Work>& work);
CUresult finish_all(int device = -1);  // -1: of all
void forget_work(int device);

// Runs work that may touch memory that is not there, or not with those rights: what would be a signal is CUDA_ERROR_ILLEGAL_ADDRESS.
CUresult guarded(const std::function<CUresult()>& run);

struct Counts {
  uint64_t handles, mappings, reservations, allocations, pinned, streams, events, libraries, pending, charged_bytes;
};
void count_work(Counts& counts);
void count_libraries(Counts& counts);

}  // namespace fake
