// Libraries of kernels and launches. A "fatbin" is a fatbin's header, the path of the emulator's
// library, and the names of the kernels in such a fatbin, a line each. A kernel is that library's
// function of the same name.
#include <dlfcn.h>
#include <string.h>

#include <algorithm>
#include <sstream>

#include "state.hpp"

namespace fake {

struct Kernel;
// A kernel in the context of a device.
struct Function {
  const Kernel* kernel = nullptr;
  int device = 0, shared_limit = kPlainShared;
};
struct Kernel {
  std::string name;
  int (*call)(unsigned x, unsigned y, unsigned z, unsigned shared_bytes, const void* params);
  int param_bytes, threads;
  Function functions[kDevices] = {};
};
struct Library {
  void* code;
  std::map<std::string, Kernel> kernels;
};

namespace {

struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
constexpr uint32_t kMagic = 0xBA55ED50;

std::set<Library*>& libraries() {
  static auto* all = new std::set<Library*>;
  return *all;
}

Kernel* find_kernel(const void* handle) {
  for (Library* library : libraries())
    for (auto& [name, kernel] : library->kernels)
      if (&kernel == handle) return &kernel;
  return nullptr;
}
Function* find_function(const void* handle) {
  for (Library* library : libraries())
    for (auto& [name, kernel] : library->kernels)
      for (Function& function : kernel.functions)
        if (&function == handle && function.kernel) return &function;
  return nullptr;
}

int asked(void* code, const std::string& symbol) {
  auto* found = reinterpret_cast<int (*)()>(dlsym(code, symbol.c_str()));
  return found ? found() : -1;
}

CUresult attribute_of(int* to, CUfunction_attribute attribute, const Function* function) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *to = function->kernel->threads; return CUDA_SUCCESS;  // its launch bound
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *to = function->shared_limit; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *to = 0; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult set_attribute(Function* function, CUfunction_attribute attribute, int value) {
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > block_shared()) return CUDA_ERROR_INVALID_VALUE;
  function->shared_limit = value;
  return CUDA_SUCCESS;
}

// The parameters, given in one of two ways; null if neither or both are given.
const void* params_of(const Kernel& kernel, void** params, void** extra) {
  if (params) return extra ? nullptr : params[0];
  const void* found = nullptr;
  size_t bytes = 0;
  for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) found = extra[1];
    if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(extra[1]);
  }
  return bytes == size_t(kernel.param_bytes) ? found : nullptr;
}

}  // namespace

void count_libraries(Counts& counts) { counts.libraries = libraries().size(); }

}  // namespace fake

using namespace fake;

EXPORTED CUresult cuLibraryLoadData(CUlibrary* to, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  ENTER;
  FatbinHeader header;
  memcpy(&header, code, sizeof header);
  if (header.magic != kMagic || header.version != 1 || header.header_bytes != sizeof header) return CUDA_ERROR_INVALID_IMAGE;
  std::istringstream lines(std::string(static_cast<const char*>(code) + sizeof header, header.bytes));
  std::string path, name;
  std::getline(lines, path);
  auto library = std::make_unique<Library>();
  library->code = path.starts_with("/") ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library->code) return CUDA_ERROR_NO_BINARY_FOR_GPU;  // for example a real one
  while (std::getline(lines, name)) {
    auto* call = reinterpret_cast<decltype(Kernel::call)>(dlsym(library->code, name.c_str()));
    if (!call) return CUDA_ERROR_INVALID_IMAGE;
    library->kernels[name] = Kernel{name, call, asked(library->code, name + "_bytes"), asked(library->code, name + "_threads"), {}};
  }
  *to = reinterpret_cast<CUlibrary>(library.get());
  libraries().insert(library.release());
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLibraryUnload(CUlibrary handle) {
  ENTER;
  auto* library = reinterpret_cast<Library*>(handle);
  if (!libraries().erase(library)) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult wrong = finish_all()) return wrong;
  dlclose(library->code);
  delete library;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLibraryGetKernel(CUkernel* to, CUlibrary handle, const char* name) {
  ENTER;
  auto* library = reinterpret_cast<Library*>(handle);
  if (!libraries().count(library)) return CUDA_ERROR_INVALID_HANDLE;
  const auto found = library->kernels.find(name);
  if (found == library->kernels.end()) return CUDA_ERROR_NOT_FOUND;
  *to = reinterpret_cast<CUkernel>(&found->second);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary handle) {
  ENTER;
  auto* library = reinterpret_cast<Library*>(handle);
  if (!libraries().count(library)) return CUDA_ERROR_INVALID_HANDLE;
  *count = library->kernels.size();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLibraryEnumerateKernels(CUkernel* to, unsigned count, CUlibrary handle) {
  ENTER;
  auto* library = reinterpret_cast<Library*>(handle);
  if (!libraries().count(library)) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& [name, kernel] : library->kernels)
    if (count-- > 0) *to++ = reinterpret_cast<CUkernel>(&kernel);
    else break;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuKernelGetName(const char** name, CUkernel handle) {
  ENTER;
  const Kernel* kernel = find_kernel(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  *name = kernel->name.c_str();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuKernelGetFunction(CUfunction* to, CUkernel handle) {
  ENTER_CONTEXT;
  Kernel* kernel = find_kernel(handle);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  Function& function = kernel->functions[current_device()];
  function.kernel = kernel, function.device = current_device();
  *to = reinterpret_cast<CUfunction>(&function);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
  ENTER;
  const Kernel* kernel = find_kernel(handle);
  if (!kernel || index) return kernel ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
  *offset = 0;
  if (bytes) *bytes = kernel->param_bytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* to, CUfunction_attribute attribute, CUfunction function) {
  ENTER_CONTEXT;
  return attribute_of(to, attribute, find_function(function));
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  ENTER_CONTEXT;
  return set_attribute(find_function(function), attribute, value);
}
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared_bytes) {
  ENTER_CONTEXT;
  const Function* found = find_function(function);
  if (!found || threads < 1 || shared_bytes > size_t(block_shared())) return found ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
  *blocks = std::min<int>(kThreads / threads, kShared / (shared_bytes + 1024));
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(CUfunction handle, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
                                 unsigned shared_bytes, CUstream into, void** params, void** extra) {
  ENTER_CONTEXT;
  Stream* stream = find_stream(into);
  const Function* function = find_function(handle);
  const int device = current_device();
  if (!stream || !function || function->device != device || stream->device != device) return CUDA_ERROR_INVALID_HANDLE;
  const Kernel* kernel = function->kernel;
  if (!x || !y || !z || x > 0x7FFFFFFF || y > 0xFFFF || z > 0xFFFF) return CUDA_ERROR_INVALID_VALUE;
  if (threads_x != unsigned(kernel->threads) || threads_y != 1 || threads_z != 1) return CUDA_ERROR_INVALID_VALUE;  // the driver accepts fewer
  if (shared_bytes > unsigned(function->shared_limit)) return CUDA_ERROR_INVALID_VALUE;
  const void* given = params_of(*kernel, params, extra);
  if (!given) return CUDA_ERROR_INVALID_VALUE;
  const auto* bytes = static_cast<const char*>(given);
  const auto work = enqueue(*stream, [=, call = kernel->call, copy = std::vector<char>(bytes, bytes + kernel->param_bytes)] {
    const Apart apart(device);
    call(x, y, z, shared_bytes, copy.data());
    return CUDA_SUCCESS;
  });
  work->is_kernel = true;
  return CUDA_SUCCESS;
}
