#include "common/cuda/arrival_counters.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/cuda/check.h"

namespace fastinfer::cuda {
namespace {

constexpr const char* kWhat = "fastinfer: counters for blocks that share a result";
constexpr int64_t kLeastCounters = 4096;  // more than all but the largest products need

struct Counters {
  int device = 0;
  uint32_t* memory = nullptr;
  int64_t count = 0;
};

struct Capture {
  unsigned long long id = 0;  // 0: none
  cudaGraph_t graph = nullptr;
};

Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Capture capture;
#if CUDART_VERSION < 13000
  check(kWhat, cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph));
#else
  check(kWhat, cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph));
#endif
  return status == cudaStreamCaptureStatusActive ? capture : Capture{};
}

// Lets this thread allocate while one of its streams is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check(kWhat, cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

Counters allocate(int device, int64_t count) {
  const RelaxedCapture relaxed;
  Counters counters{.device = device, .count = std::max(count, kLeastCounters)};
  const size_t bytes = static_cast<size_t>(counters.count) * sizeof(uint32_t);
  // The launch that uses them may be on a stream that is being captured, so they are cleared on another one.
  cudaStream_t stream = nullptr;
  check(kWhat, cudaMalloc(reinterpret_cast<void**>(&counters.memory), bytes));
  check(kWhat, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(kWhat, cudaMemsetAsync(counters.memory, 0, bytes, stream));
  check(kWhat, cudaStreamSynchronize(stream));
  check(kWhat, cudaStreamDestroy(stream));
  return counters;
}

// The counters of graphs that are gone. It calls nothing of CUDA, because CUDA calls it when a graph is destroyed.
class FreeCounters {
 public:
  Counters take(int device, int64_t count) {
    const std::lock_guard lock(mutex_);
    for (Counters& counters : free_) {
      if (counters.device != device || counters.count < count) continue;
      const Counters taken = std::exchange(counters, free_.back());
      free_.pop_back();
      return taken;
    }
    return {};
  }

  void give_back(const Counters& counters) {
    const std::lock_guard lock(mutex_);
    free_.push_back(counters);
  }

 private:
  std::mutex mutex_;
  std::vector<Counters> free_;
};

FreeCounters& free_counters() {
  static auto& counters = *new FreeCounters;  // never destroyed: a graph may be, when the process ends
  return counters;
}

Counters counters_of_graph(int device, cudaGraph_t graph, int64_t count) {
  Counters counters = free_counters().take(device, count);
  if (counters.memory == nullptr) counters = allocate(device, count);
  const auto give_back = [](void* owned) {
    free_counters().give_back(*std::unique_ptr<Counters>(static_cast<Counters*>(owned)));
  };
  cudaUserObject_t owner = nullptr;
  auto owned = std::make_unique<Counters>(counters);
  check(kWhat, cudaUserObjectCreate(&owner, owned.get(), give_back, 1, cudaUserObjectNoDestructorSync));
  owned.release();
  check(kWhat, cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove));
  return counters;
}

// The counters of a stream outside of captures, and those of its last capture.
struct StreamCounters {
  Counters usual, captured;
  unsigned long long capture = 0;
};

}  // namespace

uint32_t* arrival_counters(void* stream, int64_t count) {
  static auto& streams = *new std::map<std::pair<int, void*>, StreamCounters>;
  static std::mutex mutex;
  int device = 0;
  check(kWhat, cudaGetDevice(&device));
  const Capture capture = capture_of(static_cast<cudaStream_t>(stream));
  const std::lock_guard lock(mutex);
  StreamCounters& of = streams[{device, stream}];
  if (capture.graph == nullptr) {
    // Another thread may be about to launch with counters that are replaced, so they stay allocated.
    if (of.usual.count < count) of.usual = allocate(device, count);
    return of.usual.memory;
  }
  if (of.capture != capture.id || of.captured.count < count) {
    of.captured = counters_of_graph(device, capture.graph, count);
    of.capture = capture.id;
  }
  return of.captured.memory;
}

}  // namespace fastinfer::cuda
