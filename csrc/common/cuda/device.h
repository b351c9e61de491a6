// The facts of a device that launch policies need.
#pragma once

#include "common/api.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

// Asked of the driver once per device.
FASTINFER_API const Device& device(int index);

// Returns true if the code that the current device runs for a kernel contains grid_dependency_wait. PTX for an
// architecture before 90, which a newer GPU may run, does not contain it, and must not be launched as dependent. Called
// once per kernel.
bool has_dependency_wait(const void* kernel);

}  // namespace fastinfer::cuda
