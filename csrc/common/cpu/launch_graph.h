// A recorded sequence of kernel calls, replayed without Python, dispatch and allocation: the CPU's CUDA graph.
//
// While a thread records, launch() also notes the kernel with a copy of its parameters, and bindings get the memory of
// their tensors from the graph (new_tensor in binding/launch.h), so that the addresses in those copies stay valid.
// Recordings that share a GraphMemory overwrite each other's tensors: their sum costs what the largest one does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/api.h"
#include "common/cpu/read_ahead.h"

namespace fastinfer::cpu {

// The memory of recorded tensors. It is never given back before the last graph and the last tensor are gone; within one
// recording what is freed is used again, which keeps a step's intermediate results in the processor's caches.
class FASTINFER_API GraphMemory {
 public:
  struct Allocation {
    void* data;
    uint64_t recording;  // the recording that it belongs to
  };

  void begin();  // a new recording may use all of it; throws std::runtime_error while there is another
  void end();
  Allocation allocate(size_t bytes);        // aligned to 64 bytes
  void free(const Allocation& allocation);  // from any thread; nothing happens once the recording is over
  bool owns(const void* data) const;

 private:
  struct Delete {
    void operator()(std::byte* data) const {
      ::operator delete(data, std::align_val_t{kAlignment});
    }
  };
  struct Segment {
    std::unique_ptr<std::byte[], Delete> data;
    size_t size;
    std::map<size_t, size_t> used;  // begin to end of what is allocated, in bytes
  };
  static constexpr size_t kAlignment = 64;

  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  uint64_t recording_ = 0;
  bool active_ = false;
};

// Errors are std::runtime_error. One thread at a time may use a graph, or graphs that share memory.
class FASTINFER_API LaunchGraph {
 public:
  explicit LaunchGraph(std::shared_ptr<GraphMemory> memory) : memory_(std::move(memory)) {}
  ~LaunchGraph();
  LaunchGraph(const LaunchGraph&) = delete;
  LaunchGraph& operator=(const LaunchGraph&) = delete;

  // Records this thread's launches until end(). Throws if the thread records already, or the graph has launches.
  void begin();
  void end();
  void clear();  // forget the launches

  // All launches in order, in this thread. An exception of a kernel ends it, and leaves the graph as it was.
  void replay() const;

  size_t size() const {
    return launches_.size();
  }
  const std::shared_ptr<GraphMemory>& memory() const {
    return memory_;
  }
  void append(std::function<void()> launch,
              const Memory& weight);  // `weight`: memory that the launch reads once, if any

 private:
  const std::shared_ptr<GraphMemory> memory_;
  std::vector<std::function<void()>> launches_;
  std::shared_ptr<std::vector<Memory>> weights_ = std::make_shared<std::vector<Memory>>();
};

FASTINFER_API LaunchGraph* recording();  // this thread's, or null

// The way from a binding to its kernel. Parameters must be complete in themselves: what they point to is a tensor's.
template <class Params>
void launch(void (*kernel)(const Params&), const std::type_identity_t<Params>& params) {
  static_assert(std::is_trivially_copyable_v<Params>);
  kernel(params);
  if (LaunchGraph* const graph = recording()) {
    Memory weight;
    if constexpr (requires { params.weight_memory; }) weight = params.weight_memory;
    graph->append([kernel, params] { kernel(params); }, weight);
  }
}

}  // namespace fastinfer::cpu
