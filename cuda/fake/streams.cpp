// Streams, events and copies. Work is a graph: it runs when a caller waits for it, after its
// predecessors, and no other work runs with it.
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "state.hpp"

namespace fake {

struct Event {
  int device;
  std::shared_ptr<Work> recorded;
  bool has_time;
};

namespace {

Stream& legacy(int device) {
  static auto* all = [] {
    auto* made = new std::vector<Stream>(kDevices);
    for (int i = 0; i < kDevices; i++) (*made)[i] = Stream{i, true, nullptr};
    return made;
  }();
  return (*all)[device];
}
std::set<Stream*>& streams() {
  static auto* all = new std::set<Stream*>;
  return *all;
}
std::set<Event*>& events() {
  static auto* all = new std::set<Event*>;
  return *all;
}
// All pending work in its order of submission, also of destroyed streams.
std::vector<std::weak_ptr<Work>>& pending() {
  static auto* all = new std::vector<std::weak_ptr<Work>>;
  return *all;
}

CUresult run(Work& work) {
  const CUresult result = work.run ? guarded(work.run) : CUDA_SUCCESS;
  work.is_done = true;
  work.ended = std::chrono::steady_clock::now();
  work.run = nullptr;
  work.before.clear();
  if (result) lose_context(work.device, result);
  return result;
}

bool is_hung(const std::shared_ptr<Work>& work) {
  if (!work || work->is_done || !number("TIERD_FAKE_CUDA_HANGS", 0)) return false;
  return work->is_kernel || std::any_of(work->before.begin(), work->before.end(), is_hung);
}

// Says no once to each query, so that no caller takes a query for a wait; then runs the work.
CUresult ask(const std::shared_ptr<Work>& work) {
  if (!work || work->is_done) return CUDA_SUCCESS;
  if (is_hung(work)) return CUDA_ERROR_NOT_READY;
  if (work->was_asked) return finish(work);
  work->was_asked = true;
  return CUDA_ERROR_NOT_READY;
}

struct Copied {
  CUdeviceptr to, from;
  size_t bytes;
};
using Snapshot = std::shared_ptr<std::vector<char>>;

// TIERD_FAKE_CUDA_PIECE_US: time that the copy engines take for each piece, beside its bytes.
CUresult copy_now(const Copied& copied, const Snapshot& snapshot) {
  if (const size_t piece_us = number("TIERD_FAKE_CUDA_PIECE_US", 0)) usleep(piece_us);
  const Range to = range_of(copied.to, copied.bytes), from = range_of(copied.from, copied.bytes);
  if (!(to.rights & PROT_WRITE) || (!snapshot && !(from.rights & PROT_READ))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  memmove(reinterpret_cast<void*>(copied.to), snapshot ? snapshot->data() : reinterpret_cast<void*>(copied.from), copied.bytes);
  return CUDA_SUCCESS;
}

Snapshot snapshot_of(const Copied& copied) {
  const Uncovered uncovered;
  const auto* begin = reinterpret_cast<const char*>(copied.from);
  return std::make_shared<std::vector<char>>(begin, begin + copied.bytes);
}

CUresult copy_error(const Copied& copied) {
  if (range_of(copied.to, copied.bytes).place == Place::kNone || range_of(copied.from, copied.bytes).place == Place::kNone) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// Memory that is not pinned goes through the driver's own buffer. A copy to the device reads it
// before the call returns. A copy from the device has arrived by then (API synchronization behavior
// in NVIDIA's reference of the driver).
CUresult copy_async(const Copied& copied, CUstream handle) {
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!copied.bytes) return CUDA_SUCCESS;
  if (CUresult wrong = copy_error(copied)) return wrong;
  const bool is_staged = range_of(copied.from, copied.bytes).place == Place::kPageable;
  const auto work = enqueue(*stream, [copied, snapshot = is_staged ? snapshot_of(copied) : nullptr] { return copy_now(copied, snapshot); });
  return range_of(copied.to, copied.bytes).place == Place::kPageable ? finish(work) : CUDA_SUCCESS;
}

// A copy from memory that is not pinned may still run when the call returns. Streams that do not
// wait for the legacy one must be made to.
CUresult copy_and_wait(const Copied& copied) {
  const bool is_staged = range_of(copied.from, copied.bytes).place == Place::kPageable;
  if (CUresult wrong = copy_async(copied, CU_STREAM_LEGACY)) return wrong;
  return is_staged ? CUDA_SUCCESS : finish(legacy(current_device()).last);
}

bool is_device(CUdeviceptr address, size_t bytes) { return range_of(address, bytes).place == Place::kDevice; }

thread_local sigjmp_buf way_out;
thread_local bool is_guarded = false;

// A fault outside guarded work, such as a test's illegal write, ends the process as usual.
void leave(int number) {
  if (is_guarded) siglongjmp(way_out, 1);
  signal(number, SIG_DFL);
}

}  // namespace

CUresult guarded(const std::function<CUresult()>& work) {
  struct sigaction action {}, before;
  action.sa_handler = leave;
  sigaction(SIGSEGV, &action, &before);
  const Uncovered uncovered;
  is_guarded = true;
  const CUresult result = sigsetjmp(way_out, 1) ? CUDA_ERROR_ILLEGAL_ADDRESS : work();
  is_guarded = false;
  sigaction(SIGSEGV, &before, nullptr);
  return result;
}

Stream* find_stream(CUstream handle) {
  if (!handle || handle == CU_STREAM_LEGACY) return &legacy(current_device());
  const auto found = streams().find(reinterpret_cast<Stream*>(handle));
  return found == streams().end() ? nullptr : *found;
}

std::shared_ptr<Work> enqueue(Stream& stream, std::function<CUresult()> run) {
  auto work = std::make_shared<Work>();
  if (stream.captured) {
    if (run) stream.captured->steps.push_back(std::move(run));
    work->is_done = true;
    return work;
  }
  work->run = std::move(run);
  work->device = stream.device;
  const auto follow = [&](const Stream& other) {
    if (other.last && !other.last->is_done) work->before.push_back(other.last);
  };
  follow(stream);
  Stream& own = legacy(stream.device);
  if (&stream == &own)
    for (const Stream* other : streams())
      if (other->is_blocking && other->device == stream.device) follow(*other);
  if (&stream != &own && stream.is_blocking) follow(own);
  auto& all = pending();
  if (all.size() % 1024 == 1023) std::erase_if(all, [](const auto& old) { return old.expired() || old.lock()->is_done; });
  all.push_back(work);
  return stream.last = work;
}

// Depth first, without recursion: streams grow long.
CUresult finish(const std::shared_ptr<Work>& last) {
  std::vector<std::shared_ptr<Work>> todo;
  if (last) todo.push_back(last);
  while (!todo.empty()) {
    const std::shared_ptr<Work> work = todo.back();
    std::erase_if(work->before, [](const auto& other) { return other->is_done; });
    todo.insert(todo.end(), work->before.begin(), work->before.end());
    if (!work->before.empty()) continue;
    todo.pop_back();
    if (work->is_done) continue;
    while (is_hung(work)) usleep(1000);
    if (CUresult wrong = run(*work)) return wrong;
  }
  return CUDA_SUCCESS;
}

CUresult finish_all(int device) {
  for (const Stream* stream : streams())
    if (stream->captured && (device < 0 || stream->device == device)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  for (const auto& each : std::vector(pending()))
    if (const auto work = each.lock(); work && (device < 0 || work->device == device))
      if (CUresult wrong = finish(work)) return wrong;
  std::erase_if(pending(), [](const auto& old) { return old.expired() || old.lock()->is_done; });
  return CUDA_SUCCESS;
}

void forget_work(int device) {
  const auto forget = [device](auto& all) {
    std::erase_if(all, [device](auto* one) {
      const bool is_its = one->device == device;
      if (is_its) delete one;
      return is_its;
    });
  };
  forget(streams()), forget(events());
  std::erase_if(pending(), [device](const auto& old) { return old.expired() || old.lock()->device == device; });
  legacy(device).last = nullptr;
}

void count_work(Counts& counts) {
  counts.streams = streams().size();
  counts.events = events().size();
  for (const auto& each : pending())
    if (const auto work = each.lock()) counts.pending += !work->is_done;
}

}  // namespace fake

using namespace fake;

// -- streams

EXPORTED CUresult cuStreamCreate(CUstream* to, unsigned flags) {
  ENTER_CONTEXT;
  if (flags & ~unsigned(CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
  auto* stream = new Stream{current_device(), !(flags & CU_STREAM_NON_BLOCKING), nullptr};
  streams().insert(stream);
  *to = reinterpret_cast<CUstream>(stream);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamCreateWithPriority(CUstream* to, unsigned flags, int) { return cuStreamCreate(to, flags); }
// Work in flight goes on.
EXPORTED CUresult cuStreamDestroy(CUstream handle) {
  ENTER_CONTEXT;
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!streams().erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
  static auto* orphans = new std::vector<std::shared_ptr<Work>>;
  std::erase_if(*orphans, [](const auto& work) { return work->is_done; });
  if (stream->last && !stream->last->is_done) orphans->push_back(stream->last);
  delete stream;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamQuery(CUstream handle) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (stream && stream->captured) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return stream ? ask(stream->last) : CUDA_ERROR_INVALID_HANDLE;
}
EXPORTED CUresult cuStreamSynchronize(CUstream handle) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (stream && stream->captured) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return stream ? finish(stream->last) : CUDA_ERROR_INVALID_HANDLE;
}
EXPORTED CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  ENTER_CONTEXT;
  const Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *status = stream->captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamWaitEvent(CUstream handle, CUevent given, unsigned) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  auto* event = reinterpret_cast<Event*>(given);
  if (!stream || !events().count(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (!event->recorded || event->recorded->is_done) return CUDA_SUCCESS;
  const std::shared_ptr<Work> awaited = event->recorded;  // a later record of the event changes nothing
  enqueue(*stream, nullptr)->before.push_back(awaited);
  return CUDA_SUCCESS;
}

// -- events

EXPORTED CUresult cuEventCreate(CUevent* to, unsigned flags) {
  ENTER_CONTEXT;
  if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;  // tierd does not need it yet
  auto* event = new Event{current_device(), nullptr, !(flags & CU_EVENT_DISABLE_TIMING)};
  events().insert(event);
  *to = reinterpret_cast<CUevent>(event);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventDestroy(CUevent given) {
  ENTER_CONTEXT;
  auto* event = reinterpret_cast<Event*>(given);
  if (!events().erase(event)) return CUDA_ERROR_INVALID_HANDLE;
  delete event;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventRecord(CUevent given, CUstream handle) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  auto* event = reinterpret_cast<Event*>(given);
  if (!stream || !events().count(event) || event->device != stream->device) return CUDA_ERROR_INVALID_HANDLE;
  event->recorded = enqueue(*stream, nullptr);
  return CUDA_SUCCESS;
}
// Records the event behind all work of a context, in any stream.
EXPORTED CUresult cuCtxRecordEvent(CUcontext context, CUevent given) {
  ENTER;
  auto* event = reinterpret_cast<Event*>(given);
  const int device = device_of(context);
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (!events().count(event) || event->device != device) return CUDA_ERROR_INVALID_HANDLE;
  for (const Stream* stream : streams())
    if (stream->captured && stream->device == device) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto work = std::make_shared<Work>();
  work->device = device;
  for (const auto& each : pending())
    if (const auto other = each.lock(); other && !other->is_done && other->device == device) work->before.push_back(other);
  work->is_done = work->before.empty();
  pending().push_back(event->recorded = work);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventQuery(CUevent given) {
  ENTER_CONTEXT;
  auto* event = reinterpret_cast<Event*>(given);
  return events().count(event) ? ask(event->recorded) : CUDA_ERROR_INVALID_HANDLE;
}
EXPORTED CUresult cuEventSynchronize(CUevent given) {
  ENTER_CONTEXT;
  auto* event = reinterpret_cast<Event*>(given);
  return events().count(event) ? finish(event->recorded) : CUDA_ERROR_INVALID_HANDLE;
}
EXPORTED CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
  ENTER_CONTEXT;
  const auto *first = reinterpret_cast<Event*>(from), *last = reinterpret_cast<Event*>(to);
  for (const Event* event : {first, last})
    if (!events().count(const_cast<Event*>(event)) || !event->has_time || !event->recorded) return CUDA_ERROR_INVALID_HANDLE;
  if (!first->recorded->is_done || !last->recorded->is_done) return CUDA_ERROR_NOT_READY;
  *ms = std::chrono::duration<float, std::milli>(last->recorded->ended - first->recorded->ended).count();
  return CUDA_SUCCESS;
}

// -- copies

EXPORTED CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  ENTER_CONTEXT;
  return bytes && !is_device(to, bytes) ? CUDA_ERROR_INVALID_VALUE : copy_and_wait({to, CUdeviceptr(from), bytes});
}
EXPORTED CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  ENTER_CONTEXT;
  return bytes && !is_device(from, bytes) ? CUDA_ERROR_INVALID_VALUE : copy_and_wait({CUdeviceptr(to), from, bytes});
}
EXPORTED CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT;
  return copy_async({to, from, bytes}, stream);
}
EXPORTED CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT;
  return bytes && !is_device(to, bytes) ? CUDA_ERROR_INVALID_VALUE : copy_async({to, CUdeviceptr(from), bytes}, stream);
}
EXPORTED CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT;
  return bytes && !is_device(from, bytes) ? CUDA_ERROR_INVALID_VALUE : copy_async({CUdeviceptr(to), from, bytes}, stream);
}
EXPORTED CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  ENTER_CONTEXT;
  return bytes && !(is_device(to, bytes) && is_device(from, bytes)) ? CUDA_ERROR_INVALID_VALUE : copy_async({to, from, bytes}, stream);
}
EXPORTED CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream handle) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!is_device(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  enqueue(*stream, [=] {
    if (!(range_of(to, bytes).rights & PROT_WRITE)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    memset(reinterpret_cast<void*>(to), value, bytes);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

// A batch has no order: the last copy goes first. A source that may be read at any time is read at
// the wrong one. Device memory: at the call, before the stream's earlier work writes it. Host
// memory: when the stream gets there.
EXPORTED CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUmemcpyAttributes* attributes, size_t* firsts,
                                     size_t attribute_count, CUstream handle) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->captured) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream == &legacy(stream->device) || !count || !attribute_count || attribute_count > count || firsts[0]) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < attribute_count; i++) {
    const auto order = attributes[i].srcAccessOrder;
    if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY) return CUDA_ERROR_INVALID_VALUE;
    if (firsts[i] >= count || (i && firsts[i] <= firsts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; i++)
    if (!bytes[i] || copy_error({to[i], from[i], bytes[i]})) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::pair<Copied, Snapshot>> all;
  bool is_awaited = false;
  for (size_t i = 0; i < count; i++) {
    const Copied copied{to[i], from[i], bytes[i]};
    const auto order = attributes[std::upper_bound(firsts, firsts + attribute_count, i) - firsts - 1].srcAccessOrder;
    const Place place = range_of(copied.from, copied.bytes).place;
    const bool is_early = order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL || (order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY && place == Place::kDevice) ||
                          (order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && place == Place::kPageable);
    all.emplace_back(copied, is_early ? snapshot_of(copied) : nullptr);
    is_awaited |= range_of(copied.to, copied.bytes).place == Place::kPageable;
  }
  const auto work = enqueue(*stream, [all] {
    CUresult result = CUDA_SUCCESS;
    for (auto each = all.rbegin(); each != all.rend() && !result; ++each) result = copy_now(each->first, each->second);
    return result;
  });
  return is_awaited ? finish(work) : CUDA_SUCCESS;
}
