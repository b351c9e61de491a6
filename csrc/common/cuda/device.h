// The facts of a device that launch policies need.
#pragma once

#include "common/api.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

// Asked of the driver once per device.
FASTINFER_API const Device& device(int index);

// Prepares a kernel for the current device, once: a launch may then ask for all the shared memory of a block. Returns
// true if the kernel may be launched as dependent: the calling thread allows it, and the code that the device runs
// contains grid_dependency_wait. PTX for an architecture before 90, which a newer GPU may run, does not contain it.
// Throws std::runtime_error with the kernel's name if the device has no code for it.
bool prepare_kernel(const char* name, const void* kernel);

}  // namespace fastinfer::cuda
