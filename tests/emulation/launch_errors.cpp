// csrc/common/cuda/launch.h and device.cpp on a runtime of this file's own, without a GPU: what is asked of the
// runtime, and what becomes of its errors. Prints what happened, for tests/emulation/test_launch.py.
#include <common/cuda/launch.h>
#include <common/dependent_launches.h>

#include <iostream>
#include <string>

namespace {

int current_device = 0, ptx_version = 90;
size_t static_shared = 16;
std::string failing;  // function of the runtime
cudaError_t last_error = cudaSuccess;

cudaError_t answer(const std::string& function) {
  if (function != failing) return cudaSuccess;
  return last_error = cudaErrorNoKernelImageForDevice;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* index) {
  *index = current_device;
  return answer("cudaGetDevice");
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*index*/) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 9;
  return answer("cudaDeviceGetAttribute");
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  std::cout << "attributes ";
  attributes->ptxVersion = ptx_version;
  attributes->sharedSizeBytes = static_shared;
  return answer("cudaFuncGetAttributes");
}

cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int value) {
  std::cout << "most=" << value << " ";
  return answer("cudaFuncSetAttribute");
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* /*kernel*/, void** args) {
  std::cout << "launch(" << *static_cast<int*>(args[0]) << ", dependent=" << config->numAttrs << ") ";
  return answer("cudaLaunchKernelExC");
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status,
                                     unsigned long long* /*id*/, cudaGraph_t* /*graph*/,
                                     const cudaGraphNode_t** /*dependencies*/, const cudaGraphEdgeData** /*edges*/,
                                     size_t* /*count*/) {
  *status = cudaStreamCaptureStatusNone;
  return answer("cudaStreamGetCaptureInfo");
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t /*error*/) {
  return "no kernel image";
}

}  // extern "C"

namespace {

void kernel(int) {}
void another(int) {}

void launch(const char* name, void (*function)(int)) {
  using fastinfer::cuda::LaunchConfig;
  const LaunchConfig config{.grid = 1, .block = 32, .shared_bytes = 1000, .dependent = true};
  try {
    fastinfer::cuda::launch(name, function, config, nullptr, 7);
  } catch (const std::exception& error) {
    std::cout << error.what() << (last_error == cudaSuccess ? "" : " and the error stays");
  }
  std::cout << "\n";
}

}  // namespace

int main() {
  for (const char* function : {"cudaGetDevice", "cudaFuncGetAttributes", "cudaDeviceGetAttribute",
                               "cudaFuncSetAttribute", "cudaLaunchKernelExC"}) {
    failing = function;
    launch("my_kernel", kernel);
  }
  failing = "";
  launch("my_kernel", kernel);
  fastinfer::set_dependent_launches(false);
  launch("my_kernel", kernel);
  fastinfer::set_dependent_launches(true);
  launch("my_kernel", kernel);
  ptx_version = 80;
  launch("another", another);
  current_device = 1;
  launch("my_kernel", kernel);
}
