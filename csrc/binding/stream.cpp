#include "binding/stream.h"

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

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

}  // namespace

void* current_stream(int device) {
  static const GetCurrentStream get = find();
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("fastinfer: torch could not tell its current CUDA stream");
  return stream;
}

}  // namespace fastinfer::cuda
