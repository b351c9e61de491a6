#include "common/cuda/device.h"

#include <cstdlib>
#include <mutex>
#include <new>

#include "common/cuda/arrival_counters.h"
#include "common/cuda/wgmma.h"

namespace fastinfer::cuda {
namespace {

// Kernels that multiply by warpgroups are a Hopper's, whichever GPU they are to run on.
Device emulate(Device device) {
  if (kHasWgmma) device.arch = 90, device.shared_bytes = 227 * 1024;
  return device;
}

Device emulated = emulate({.arch = 80, .multiprocessors = 6, .shared_bytes = 163 * 1024});

}  // namespace

const Device& device(int /*index*/) {
  return emulated;
}

uint32_t* arrival_counters(void* /*stream*/, int64_t count) {
  static std::mutex mutex;
  static uint32_t* memory = nullptr;  // counters that are replaced stay: another thread may be about to use them
  static int64_t most = 0;
  const std::lock_guard lock(mutex);
  if (most < count) {
    memory = static_cast<uint32_t*>(std::calloc(static_cast<size_t>(count), sizeof(uint32_t)));
    if (memory == nullptr) throw std::bad_alloc();
    most = count;
  }
  return memory;
}

}  // namespace fastinfer::cuda

void emulation_set_device(int arch, int multiprocessors, size_t shared_bytes) {
  using namespace fastinfer::cuda;
  emulated = emulate({.arch = arch, .multiprocessors = multiprocessors, .shared_bytes = shared_bytes});
}
