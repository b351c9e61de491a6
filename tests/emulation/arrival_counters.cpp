// csrc/common/cuda/arrival_counters.cpp on a runtime of this file's own, without a GPU: which counters a stream and a
// captured graph get. Prints what happened, for tests/emulation/test_arrival_counters.py.
#include <common/cuda/arrival_counters.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

struct CUgraph_st {
  int name;
};
struct CUuserObject_st {
  void* owned;
  cudaHostFn_t destroy;
};

namespace {

int current_device = 0;
size_t free_bytes = 1 << 20;
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
std::map<void*, std::pair<unsigned long long, cudaGraph_t>> captures;
std::map<cudaGraph_t, std::vector<CUuserObject_st*>> owned_by;
std::map<const void*, size_t> allocated;
int num_streams = 0;

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* index) {
  *index = current_device;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** /*dependencies*/,
                                     const cudaGraphEdgeData** /*edges*/, size_t* /*count*/) {
  const auto at = captures.find(stream);
  *status = at == captures.end() ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (at != captures.end()) *id = at->second.first, *graph = at->second.second;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}

// What a thread may not do while another one captures, unless its mode is relaxed.
cudaError_t unsafe() {
  return mode == cudaStreamCaptureModeRelaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (bytes > free_bytes) return cudaErrorMemoryAllocation;
  free_bytes -= bytes;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xff, bytes);
  allocated[*memory] = bytes;
  std::cout << "malloc(" << bytes << ") ";
  return unsafe();
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = reinterpret_cast<cudaStream_t>(1000L + flags);
  ++num_streams;
  return unsafe();
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (stream != reinterpret_cast<cudaStream_t>(1000L + cudaStreamNonBlocking)) return cudaErrorStreamCaptureIsolation;
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
  return unsafe();
}

cudaError_t cudaStreamDestroy(cudaStream_t /*stream*/) {
  --num_streams;
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* owned, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
  if (references != 1 || flags != cudaUserObjectNoDestructorSync) return cudaErrorInvalidValue;
  *object = new CUuserObject_st{owned, destroy};
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  if (count != 1 || flags != cudaGraphUserObjectMove) return cudaErrorInvalidValue;
  owned_by[graph].push_back(object);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "not permitted";
}

}  // extern "C"

namespace {

void* stream(long name) {
  return reinterpret_cast<void*>(name);
}

void begin_capture(void* stream, unsigned long long id) {
  captures[stream] = {id, new CUgraph_st{static_cast<int>(id)}};
}

cudaGraph_t end_capture(void* stream) {
  const cudaGraph_t graph = captures.at(stream).second;
  captures.erase(stream);
  return graph;
}

void destroy(cudaGraph_t graph) {
  for (CUuserObject_st* object : owned_by[graph]) {
    object->destroy(object->owned);
    delete object;
  }
  owned_by.erase(graph);
  delete graph;
}

// Prints a name for the counters, the same for the same memory; writes into all of them what a launch may not leave.
void ask(void* stream, int64_t count) {
  static std::map<const void*, char> names;
  try {
    const uint32_t* const counters = fastinfer::cuda::arrival_counters(stream, count);
    for (int64_t i = 0; i < count; ++i) {
      if (counters[i] != 0) std::cout << "not zero ";
    }
    if (allocated.at(counters) < static_cast<size_t>(count) * sizeof(uint32_t)) std::cout << "too few ";
    std::cout << names.emplace(counters, 'A' + static_cast<char>(names.size())).first->second;
  } catch (const std::exception& error) {
    std::cout << error.what();
  }
  std::cout << (mode == cudaStreamCaptureModeGlobal ? "" : " the mode stays")
            << (num_streams == 0 ? "" : " a stream stays") << "\n";
}

}  // namespace

int main() {
  ask(stream(1), 3);
  ask(stream(1), 4096);
  ask(stream(2), 1);
  current_device = 1;
  ask(stream(1), 1);
  current_device = 0;
  begin_capture(stream(1), 7);
  ask(stream(1), 1);
  ask(stream(1), 5000);  // both belong to the graph
  ask(stream(1), 1);
  ask(stream(2), 1);  // takes no part in the capture
  const cudaGraph_t first = end_capture(stream(1));
  ask(stream(1), 1);
  begin_capture(stream(1), 8);
  ask(stream(1), 1);
  const cudaGraph_t second = end_capture(stream(1));
  destroy(first);
  begin_capture(stream(2), 9);
  ask(stream(2), 5000);  // those of the first graph
  ask(stream(2), 1);
  const cudaGraph_t third = end_capture(stream(2));
  current_device = 1;
  begin_capture(stream(2), 10);
  ask(stream(2), 1);  // not those of another device
  destroy(end_capture(stream(2)));
  free_bytes = 0;
  ask(stream(3), 1);
  destroy(second);
  destroy(third);
}
