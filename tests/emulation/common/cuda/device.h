// csrc/common/cuda/device.h on the emulator.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

// What emulation_set_device was last called with; at first a small GPU, so that small problems are split over its
// multiprocessors.
const Device& device(int index);

}  // namespace fastinfer::cuda

extern "C" __attribute__((visibility("default"))) void emulation_set_device(int arch, int multiprocessors,
                                                                            size_t shared_bytes);
