#include "common/cuda/stream.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace fastinfer::cuda {
namespace {

using GetCurrentStream = int32_t (*)(int32_t device, void** stream);

// The function is part of the stable ABI, but of libtorch_cuda, which a CPU build of torch does not have, and which
// Python loads without making its symbols global. So it is neither linked nor weak: it is looked up in the library that
// torch has already loaded.
GetCurrentStream find() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* const symbol = library != nullptr ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  if (symbol == nullptr) throw std::runtime_error("fastinfer: got a CUDA tensor, but this torch has no libtorch_cuda");
  return reinterpret_cast<GetCurrentStream>(symbol);
}

int attribute(int index, cudaDeviceAttr attr) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attr, index);
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastinfer: ") + cudaGetErrorString(error));
  return value;
}

}  // namespace

const Device& device(int index) {
  static std::array<Device, 64> devices{};
  static std::array<std::once_flag, devices.size()> asked;
  const auto i = static_cast<size_t>(index);
  std::call_once(asked.at(i), [&] {
    devices[i] = {
        .arch = 10 * attribute(index, cudaDevAttrComputeCapabilityMajor) +
                attribute(index, cudaDevAttrComputeCapabilityMinor),
        .multiprocessors = attribute(index, cudaDevAttrMultiProcessorCount),
        .shared_bytes = static_cast<size_t>(attribute(index, cudaDevAttrMaxSharedMemoryPerBlockOptin)),
    };
  });
  return devices[i];
}

bool has_dependency_wait(const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, bool> known;
  int index = 0;
  cudaGetDevice(&index);
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({index, kernel}, false);
  if (is_new) {
    cudaFuncAttributes attributes{};
    at->second = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  }
  return at->second;
}

void* current_stream(int device) {
  static const GetCurrentStream get = find();
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("fastinfer: torch could not tell its current CUDA stream");
  return stream;
}

}  // namespace fastinfer::cuda
