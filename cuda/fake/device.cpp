// Devices, their primary contexts, and the bindings' search for the driver's functions.
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "state.hpp"

namespace fake {

namespace {
pid_t owner = 0;
struct Primary {
  int retained = 0;
  CUresult lost = CUDA_SUCCESS;
};
Primary primaries[kDevices];  // the address of one is its context's handle
thread_local std::vector<CUcontext> entered;  // the last is current

Primary* primary_of(CUcontext context) { return reinterpret_cast<Primary*>(context); }
CUcontext current() { return entered.empty() ? nullptr : entered.back(); }
bool is_retained(CUcontext context) {
  for (Primary& primary : primaries)
    if (primary_of(context) == &primary) return primary.retained;
  return false;
}
}  // namespace

std::recursive_mutex& mutex() {
  static auto* only = new std::recursive_mutex;
  return *only;
}
bool is_initialized() { return owner == getpid(); }
CUresult context_error() {
  if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
  const Primary& primary = *primary_of(current());
  return primary.retained ? primary.lost : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}
bool is_device(int number) { return number >= 0 && size_t(number) < std::min(size_t(kDevices), fake::number("TIERD_FAKE_CUDA_DEVICES", 1)); }
int device_of(CUcontext context) { return is_retained(context) ? int(primary_of(context) - primaries) : -1; }
int current_device() { return current() ? int(primary_of(current()) - primaries) : 0; }
void lose_context(int device, CUresult error) { primaries[device].lost = error; }
size_t number(const char* variable, size_t otherwise) {
  const char* given = getenv(variable);
  return given ? strtoull(given, nullptr, 0) : otherwise;
}
CUresult strike(const char* function) {
  const char* given = getenv("TIERD_FAKE_CUDA_STRIKE");
  char chosen[64], what[16];
  unsigned long which;
  int device = -1;
  if (!given || sscanf(given, "%63[^:]:%lu:%15[^:]:%d", chosen, &which, what, &device) < 3) return CUDA_SUCCESS;
  if (device >= 0 && (!current() || device != current_device())) return CUDA_SUCCESS;
  const std::string name(function), plain = name.substr(0, name.find("_v"));  // cuda.h adds versions to some names
  if (strcmp(chosen, "*") && chosen != plain) return CUDA_SUCCESS;
  static unsigned long calls = 0;
  if (++calls != which && which) return CUDA_SUCCESS;
  const CUresult wrong = CUresult(*what == 'e' ? atoi(what + 1) : 0);
  if (wrong == CUDA_ERROR_ILLEGAL_ADDRESS) lose_context(current_device(), wrong);
  if (*what != 'e') raise(atoi(what));
  return wrong;
}
bool is_left_out(const char* name) {
  const char* given = getenv("TIERD_FAKE_CUDA_WITHOUT");
  return given && !strcmp(given, name);
}

namespace {

// An H100's attributes. Others are refused, so that no caller relies on a value that the fake does
// not define.
const std::map<CUdevice_attribute, int> kAttributes = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kMultiprocessors},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, kThreads},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, kPlainShared},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, kShared},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
};

}  // namespace
}  // namespace fake

using namespace fake;

EXPORTED CUresult cuInit(unsigned flags) {
  std::lock_guard lock(mutex());
  if (CUresult wrong = strike(__func__)) return wrong;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (!number("TIERD_FAKE_CUDA_DEVICES", 1)) return CUDA_ERROR_NO_DEVICE;
  if (owner && owner != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  owner = getpid();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

// -- device

EXPORTED CUresult cuDeviceGetCount(int* count) {
  ENTER;
  for (*count = 0; is_device(*count);) ++*count;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER;
  *device = ordinal;
  return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  ENTER;
  if (!is_device(device) || length < 1) return is_device(device) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
  strncpy(name, "Fake GPU", length)[length - 1] = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  ENTER;
  memcpy(uuid->bytes, "tierd's fake GPU", sizeof uuid->bytes);
  uuid->bytes[0] += char(device);
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORTED CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  ENTER;
  *bytes = number("TIERD_FAKE_CUDA_BYTES", size_t(8) << 30);
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
    *value = !is_left_out("vmm");
    return CUDA_SUCCESS;
  }
  if (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
    *value = !is_left_out("descriptors");
    return CUDA_SUCCESS;
  }
  if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) {
    *value = !is_left_out("rdma");
    return CUDA_SUCCESS;
  }
  if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
    *value = !is_left_out("host pointers");
    return CUDA_SUCCESS;
  }
  if (attribute == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) {
    *value = int(number("TIERD_FAKE_CUDA_READ_ONLY_REGISTER", 1));
    return CUDA_SUCCESS;
  }
  if (attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) {
    *value = block_shared();
    return CUDA_SUCCESS;
  }
  const auto found = kAttributes.find(attribute);
  if (found == kAttributes.end()) return CUDA_ERROR_INVALID_VALUE;
  *value = found->second;
  return CUDA_SUCCESS;
}

// -- context

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* to, CUdevice device) {
  ENTER;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  primaries[device].retained++;
  *to = reinterpret_cast<CUcontext>(&primaries[device]);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  ENTER;
  if (!is_device(device) || !primaries[device].retained) return is_device(device) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_DEVICE;
  if (--primaries[device].retained) return CUDA_SUCCESS;
  forget_work(device);
  primaries[device].lost = CUDA_SUCCESS;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
  ENTER;
  *flags = 0;
  *is_active = is_device(device) && primaries[device].retained > 0;
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORTED CUresult cuCtxSetCurrent(CUcontext to) {
  ENTER;
  if (to && !is_retained(to)) return CUDA_ERROR_INVALID_CONTEXT;
  if (!entered.empty()) entered.pop_back();
  if (to) entered.push_back(to);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxPushCurrent(CUcontext to) {
  ENTER;
  if (!is_retained(to)) return CUDA_ERROR_INVALID_CONTEXT;
  entered.push_back(to);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxPopCurrent(CUcontext* left) {
  ENTER;
  if (entered.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *left = current();
  entered.pop_back();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* to) {
  ENTER;
  *to = current();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
  ENTER_CONTEXT;
  *device = current_device();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSynchronize() {
  ENTER_CONTEXT;
  return finish_all(current_device());
}

// -- names

EXPORTED CUresult cuGetErrorName(CUresult error, const char** name) {
#define NAME(E) \
  case E: *name = #E; return CUDA_SUCCESS;
  switch (error) {
    NAME(CUDA_SUCCESS) NAME(CUDA_ERROR_INVALID_VALUE) NAME(CUDA_ERROR_OUT_OF_MEMORY) NAME(CUDA_ERROR_NOT_INITIALIZED) NAME(CUDA_ERROR_NO_DEVICE)
    NAME(CUDA_ERROR_INVALID_DEVICE) NAME(CUDA_ERROR_INVALID_IMAGE) NAME(CUDA_ERROR_INVALID_CONTEXT) NAME(CUDA_ERROR_NO_BINARY_FOR_GPU)
    NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) NAME(CUDA_ERROR_INVALID_HANDLE) NAME(CUDA_ERROR_NOT_FOUND)
    NAME(CUDA_ERROR_ILLEGAL_STATE) NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    NAME(CUDA_ERROR_NOT_READY) NAME(CUDA_ERROR_ILLEGAL_ADDRESS) NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED) NAME(CUDA_ERROR_NOT_SUPPORTED)
    default: *name = nullptr; return CUDA_ERROR_INVALID_VALUE;
  }
#undef NAME
}
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

// The newest version of a function, as cuda.h names it. A missing function is reported, and the
// bindings name it.
EXPORTED CUresult cuGetProcAddress_v2(const char* name, void** to, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  static void* self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *to = nullptr;
  for (const char* version : {"_v3", "_v2", ""})
    if (!*to && !is_left_out(name)) *to = dlsym(self, (std::string(name) + version).c_str());
  if (found) *found = *to ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *to ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// The objects that this process has not released, for tests: they count leaks here and in
// descriptors.
EXPORTED void fake_cuda_counts(Counts* to) {
  std::lock_guard lock(mutex());
  const Memory& m = memory();
  *to = {m.handles.size(), m.mappings.size(), m.reservations.size(), m.allocations.size(), m.pinned.size(), 0, 0, 0, 0, 0};
  for (const size_t charged : m.charged) to->charged_bytes += charged;
  count_work(*to);
  count_libraries(*to);
}

// kvikio looks for these when it begins, and its reads call none of them.
EXPORTED CUresult cuCtxCreate_v4(CUcontext*, CUctxCreateParams*, unsigned, CUdevice) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORTED CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORTED CUresult cuLaunchHostFunc(CUstream, CUhostFn, void*) { return CUDA_ERROR_NOT_SUPPORTED; }
