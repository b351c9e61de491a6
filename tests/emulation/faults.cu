// Kernels with a planted fault each, and their sound twin: what the detectors must catch, and must not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string_view>

#include "block_order.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/wgmma.h"
#include "memory_guard.h"

namespace fastinfer::cuda {
namespace {

enum class Fault { kNone, kPresent };

constexpr int kThreads = 64, kCount = kThreads - 4, kBlocks = 4, kGroup = 128;

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

// A product of ones, whose operands are one matrix [64, 64]. The faults: it is read before the wait; a copy overwrites
// the operands before the wait; copies are not made visible to products.
enum class ProductFault { kNone, kEarlySums, kFreedStage, kMissingFence };

template <ProductFault kFault>
__device__ void product(int* out, int count) {
  unsigned char* const shared = dynamic_shared();
  const int i = static_cast<int>(threadIdx.x), vectors = 64 * 128 / 16;
  for (int j = i; j < vectors; j += kGroup) {
    for (int l = 0; l < 4; ++l) out[4 * j + l] = 0x3f803f80;
    cp_async(shared + j * 16, out + 4 * j);
  }
  cp_async_commit();
  cp_async_wait<0>();
  if (kFault != ProductFault::kMissingFence) fence_async_shared();
  __syncthreads();
  float d[32] = {};
  wgmma_fence(d);
  wgmma<__nv_bfloat16, 64>(d, wgmma_matrix(shared), wgmma_matrix(shared));
  wgmma_commit();
  if (kFault == ProductFault::kFreedStage) cp_async(shared, out);
  if (kFault != ProductFault::kEarlySums) wgmma_wait<0>(d);
  if (!(d[0] == 16.0f)) __trap();
  if (i < count) out[i] = i;
}

template <Fault kFault>
__global__ void early_sums(int* out, int count) {
  product<kFault == Fault::kPresent ? ProductFault::kEarlySums : ProductFault::kNone>(out, count);
}

template <Fault kFault>
__global__ void freed_stage(int* out, int count) {
  product<kFault == Fault::kPresent ? ProductFault::kFreedStage : ProductFault::kNone>(out, count);
}

template <Fault kFault>
__global__ void missing_async_fence(int* out, int count) {
  product<kFault == Fault::kPresent ? ProductFault::kMissingFence : ProductFault::kNone>(out, count);
}

// Adds up what the other blocks have written; the fault is that the block with the highest number believes to be the
// last one.
template <Fault kFault>
__global__ void order_of_blocks(int* memory, int count) {
  int* const arrived = memory + gridDim.x * kThreads;
  const int i = static_cast<int>(threadIdx.x);
  memory[blockIdx.x * kThreads + i] = i;
  __threadfence();
  __syncthreads();
  const bool last = __syncthreads_or(i == 0 && atomicAdd(arrived, 1) == static_cast<int>(gridDim.x) - 1);
  __threadfence();
  if (kFault == Fault::kPresent ? blockIdx.x + 1 < gridDim.x : !last) return;
  for (unsigned block = 0; block < gridDim.x; ++block) {
    if (i < count && memory[block * kThreads + i] != i) __trap();
  }
}

// The fault: two blocks use the same scratch memory.
template <Fault kFault>
__global__ void shared_scratch(int* memory, int count) {
  int* const scratch = memory + (kFault == Fault::kPresent ? 0 : blockIdx.x * kThreads);
  const int i = static_cast<int>(threadIdx.x), mine = static_cast<int>(blockIdx.x) * kThreads;
  scratch[i] = mine + i;
  __syncthreads();
  if (i < count && scratch[kThreads - 1 - i] != mine + kThreads - 1 - i) __trap();
}

// The last block to arrive reads what the others have written. The fault: nothing orders their writes before their
// arrival.
template <Fault kFault>
__global__ void missing_release_fence(int* memory, int count) {
  int* const arrived = memory + gridDim.x * kThreads;
  const int i = static_cast<int>(threadIdx.x);
  memory[blockIdx.x * kThreads + i] = i;
  if (kFault == Fault::kNone) __threadfence();
  __syncthreads();
  bool last = false;
  if (i == 0) {
    last = atomicAdd(arrived, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
  }
  if (!__syncthreads_or(last)) return;
  __threadfence();
  for (unsigned block = 0; block < gridDim.x; ++block) {
    if (i < count && memory[block * kThreads + i] != i) __trap();
  }
}

// The same with the other half: nothing orders the reads after the arrival.
template <Fault kFault>
__global__ void missing_acquire_fence(int* memory, int count) {
  int* const arrived = memory + gridDim.x * kThreads;
  const int i = static_cast<int>(threadIdx.x);
  memory[blockIdx.x * kThreads + i] = i;
  __threadfence();
  __syncthreads();
  const bool last = i == 0 && atomicAdd(arrived, 1) == static_cast<int>(gridDim.x) - 1;
  if (!__syncthreads_or(last)) return;
  if (kFault == Fault::kNone) __threadfence();
  for (unsigned block = 0; block < gridDim.x; ++block) {
    if (i < count && memory[block * kThreads + i] != i) __trap();
  }
}

// The fault: half of the threads vote with other words, which is another barrier.
template <Fault kFault>
__global__ void divergent_vote(int* memory, int count) {
  const int i = static_cast<int>(threadIdx.x);
  const int any = kFault == Fault::kPresent && i < 32 ? __syncthreads_or(i == 3) : __syncthreads_count(i == 3);
  if (i < count) memory[i] = any;
}

// ---- of kernels launched as dependent ----

__device__ int own_element() {
  return static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
}

template <Fault kFault>
__global__ void read_before_wait(int* memory, int count) {
  const int i = own_element();
  int value = kFault == Fault::kPresent ? memory[i] : 0;
  grid_dependency_wait();
  if (kFault == Fault::kNone) value = memory[i];
  if (static_cast<int>(threadIdx.x) < count) memory[i] = value + 1;
}

template <Fault kFault>
__global__ void write_before_wait(int* memory, int count) {
  const int i = own_element();
  if (kFault == Fault::kPresent && static_cast<int>(threadIdx.x) < count) memory[i] = i;
  grid_dependency_wait();
  if (kFault == Fault::kNone && static_cast<int>(threadIdx.x) < count) memory[i] = i;
}

template <Fault kFault>
__global__ void missing_wait(int* memory, int count) {
  if constexpr (kFault == Fault::kPresent) return;
  grid_dependency_wait();
  if (static_cast<int>(threadIdx.x) < count) memory[own_element()] = count;
}

// Reads memory that is declared constant; the fault is to read other memory.
template <Fault kFault>
__global__ void constant_before_wait(int* memory, const int* constants, int count) {
  const int i = own_element(), value = (kFault == Fault::kPresent ? memory : constants)[i];
  grid_dependency_wait();
  if (static_cast<int>(threadIdx.x) < count) memory[i] = value;
}

// Memory as torch allocates it.
struct IntMemory {
  explicit IntMemory(size_t count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, count * sizeof(int)) != 0) throw std::bad_alloc();
    data = static_cast<int*>(memory);
    std::fill_n(data, count, 0);
  }
  IntMemory(const IntMemory&) = delete;
  IntMemory& operator=(const IntMemory&) = delete;
  ~IntMemory() {
    std::free(data);
  }
  int* data = nullptr;
};

template <Fault kFault>
bool run(std::string_view name) {
  const auto start = [&](const char* kernel_name, void (*kernel)(int*, int), const LaunchConfig& config, int elements) {
    if (name != kernel_name) return false;
    const IntMemory memory(static_cast<size_t>(elements));
    launch(kernel_name, kernel, config, nullptr, memory.data, kCount);
    return true;
  };
  const LaunchConfig one{.grid = 1, .block = kThreads, .shared_bytes = kThreads * sizeof(int)};
  const LaunchConfig several{.grid = kBlocks, .block = kThreads};
  const LaunchConfig group{.grid = 1, .block = kGroup, .shared_bytes = 64 * 128};
  const LaunchConfig dependent{.grid = kBlocks, .block = kThreads, .dependent = true};
  if (name == "constant_before_wait") {
    const IntMemory memory(kBlocks * kThreads), constants(kBlocks * kThreads);
    const void* const constant[] = {constants.data};
    emulation_set_constant_memory(constant, 1);
    launch("constant_before_wait", constant_before_wait<kFault>, dependent, nullptr, memory.data, constants.data,
           kCount);
    return true;
  }
  return start("global_bounds", global_bounds<kFault>, one, kCount) ||
         start("shared_bounds", shared_bounds<kFault>, one, kCount) ||
         start("missing_barrier", missing_barrier<kFault>, one, kCount) ||
         start("missing_warp_barrier", missing_warp_barrier<kFault>, one, kCount) ||
         start("divergent_barrier", divergent_barrier<kFault>, one, kCount) ||
         start("barrier_after_exit", barrier_after_exit<kFault>, one, kCount) ||
         start("divergent_vote", divergent_vote<kFault>, one, kCount) ||
         start("early_read", early_read<kFault>, one, kCount) ||
         start("early_sums", early_sums<kFault>, group, 64 * 32) ||
         start("freed_stage", freed_stage<kFault>, group, 64 * 32) ||
         start("missing_async_fence", missing_async_fence<kFault>, group, 64 * 32) ||
         start("order_of_blocks", order_of_blocks<kFault>, several, kBlocks * kThreads + 1) ||
         start("shared_scratch", shared_scratch<kFault>, several, kBlocks * kThreads + 1) ||
         start("missing_release_fence", missing_release_fence<kFault>, several, kBlocks * kThreads + 1) ||
         start("missing_acquire_fence", missing_acquire_fence<kFault>, several, kBlocks * kThreads + 1) ||
         start("read_before_wait", read_before_wait<kFault>, dependent, kBlocks * kThreads) ||
         start("write_before_wait", write_before_wait<kFault>, dependent, kBlocks * kThreads) ||
         start("missing_wait", missing_wait<kFault>, dependent, kBlocks * kThreads);
}

}  // namespace
}  // namespace fastinfer::cuda

// faults NAME sound|faulty [ORDER OF THE BLOCKS]: exits with 0, 1 after an error of the emulator, or as a sanitizer
// wills.
int main(int argc, char** argv) {
  using namespace fastinfer::cuda;
  try {
    if (argc > 3 && !emulation_set_block_order(argv[3])) throw std::invalid_argument("unknown order of blocks");
    const bool sound = argc > 2 && std::strcmp(argv[2], "sound") == 0;
    const bool known = argc > 2 && (sound ? run<Fault::kNone>(argv[1]) : run<Fault::kPresent>(argv[1]));
    if (!known) std::fprintf(stderr, "no such kernel\n");
    return known ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
