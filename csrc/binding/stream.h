// torch's current CUDA stream.
#pragma once

namespace fastinfer::cuda {

// The cudaStream_t that torch uses on this device, as void*. Throws std::runtime_error if torch has no CUDA.
void* current_stream(int device);

}  // namespace fastinfer::cuda
