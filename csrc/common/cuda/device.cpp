#include "common/cuda/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "common/cuda/check.h"
#include "common/dependent_launches.h"

namespace fastinfer::cuda {
namespace {

int attribute(int index, cudaDeviceAttr attr) {
  int value = 0;
  check("fastinfer", cudaDeviceGetAttribute(&value, attr, index));
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

bool prepare_kernel(const char* name, const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, bool> known;
  int index = 0;
  check(name, cudaGetDevice(&index));
  const std::lock_guard lock(mutex);
  if (const auto at = known.find({index, kernel}); at != known.end()) {
    return at->second && dependent_launches();
  }
  cudaFuncAttributes attributes{};
  check(name, cudaFuncGetAttributes(&attributes, kernel));
  // The limit of this device, not of one launch: another thread may be about to launch the kernel with more.
  const size_t most = device(index).shared_bytes - attributes.sharedSizeBytes;
  if (most > kDefaultSharedBytes) {
    check(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)));
  }
  const bool can_wait = known[{index, kernel}] = attributes.ptxVersion >= 90;
  return can_wait && dependent_launches();
}

}  // namespace fastinfer::cuda
