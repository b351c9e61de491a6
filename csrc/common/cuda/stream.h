// torch's current CUDA stream, and the facts of a device that launch policies need.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

// The cudaStream_t that torch uses on this device, as void*. Throws std::runtime_error if torch has no CUDA.
void* current_stream(int device);

// Asked of the driver once per device.
const Device& device(int index);

}  // namespace fastinfer::cuda
