#include "common/cuda/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace fastinfer::cuda {
namespace {

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

}  // namespace fastinfer::cuda
