// Whether a kernel may be launched before the kernel before it in its stream has ended (programmatic dependent launch).
#pragma once

#include "common/api.h"

namespace fastinfer {

// The value for this thread, at first true. common/cuda/device.cpp reads it for every launch.
FASTINFER_API bool dependent_launches();

// Changes it, and returns the previous value.
FASTINFER_API bool set_dependent_launches(bool value);

}  // namespace fastinfer
