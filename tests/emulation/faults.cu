// Kernels with a planted fault each, and their sound twin: what the detectors must catch, and must not.
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {
namespace {

enum class Fault { kNone, kPresent };

// Each thread writes its element; the fault is one element too many.
template <Fault kFault>
__global__ void global_bounds(int* out, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count + (kFault == Fault::kPresent ? 1 : 0)) out[i] = i;
}

template <Fault kFault>
__global__ void shared_bounds(int* out, int count) {
  int* values = reinterpret_cast<int*>(dynamic_shared());
  const int i = static_cast<int>(threadIdx.x);
  values[i + (kFault == Fault::kPresent ? 1 : 0)] = i;
  __syncthreads();
  if (i < count) out[i] = values[i];
}

// Reverses the elements; the fault is that nobody waits for the writes.
template <Fault kFault>
__global__ void missing_barrier(int* out, int count) {
  int* values = reinterpret_cast<int*>(dynamic_shared());
  const int i = static_cast<int>(threadIdx.x);
  values[i] = i;
  if constexpr (kFault == Fault::kNone) __syncthreads();
  if (i < count) out[i] = values[63 - i];
}

// The same within a warp, where lanes in step would hide it.
template <Fault kFault>
__global__ void missing_warp_barrier(int* out, int count) {
  int* values = reinterpret_cast<int*>(dynamic_shared());
  const int i = static_cast<int>(threadIdx.x), lane = i % 32;
  values[i] = i;
  if constexpr (kFault == Fault::kNone) __syncwarp();
  if (i < count) out[i] = values[i - lane + 31 - lane];
}

// The fault: half of the threads take another barrier than the others.
template <Fault kFault>
__global__ void divergent_barrier(int* out, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (kFault == Fault::kPresent && i < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (i < count) out[i] = i;
}

// The fault: threads that have ended never arrive.
template <Fault kFault>
__global__ void barrier_after_exit(int* out, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (kFault == Fault::kPresent && i >= count) return;
  __syncthreads();
  if (i < count) out[i] = i;
}

// The fault: the copied data are read before the wait. Prints what was read; the sound twin sees 7.
template <Fault kFault>
__global__ void early_read(int* out, int count) {
  int* values = reinterpret_cast<int*>(dynamic_shared());
  const int i = static_cast<int>(threadIdx.x);
  if (i == 0) {
    for (int j = 0; j < 4; ++j) out[j] = 7;
    cp_async(values, out);
    cp_async_commit();
    if (kFault == Fault::kNone) cp_async_wait<0>();
    if (values[0] != 7) __trap();
  }
  __syncthreads();
  if (i < count) out[i] = i;
}

template <Fault kFault>
bool run(std::string_view name) {
  constexpr int kThreads = 64;
  std::vector<int> out(kThreads - 4);
  const int count = static_cast<int>(out.size());
  const auto start = [&](const char* kernel_name, void (*kernel)(int*, int)) {
    if (name != kernel_name) return false;
    launch(kernel_name, kernel, {.grid = 1, .block = kThreads, .shared_bytes = kThreads * sizeof(int)}, nullptr,
           out.data(), count);
    return true;
  };
  return start("global_bounds", global_bounds<kFault>) || start("shared_bounds", shared_bounds<kFault>) ||
         start("missing_barrier", missing_barrier<kFault>) ||
         start("missing_warp_barrier", missing_warp_barrier<kFault>) ||
         start("divergent_barrier", divergent_barrier<kFault>) ||
         start("barrier_after_exit", barrier_after_exit<kFault>) || start("early_read", early_read<kFault>);
}

}  // namespace
}  // namespace fastinfer::cuda

// faults NAME [sound]: exits with 0, 1 after an error of the emulator, or as a sanitizer wills.
int main(int argc, char** argv) {
  using namespace fastinfer::cuda;
  try {
    const bool sound = argc > 2 && std::strcmp(argv[2], "sound") == 0;
    const bool known = argc > 1 && (sound ? run<Fault::kNone>(argv[1]) : run<Fault::kPresent>(argv[1]));
    if (!known) std::fprintf(stderr, "no such kernel\n");
    return known ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
