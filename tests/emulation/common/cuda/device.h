// csrc/common/cuda/device.h on the emulator: a small GPU, so that small problems are split over its multiprocessors.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline const Device& device(int /*index*/) {
  static const Device small{.arch = 80, .multiprocessors = 6, .shared_bytes = 163 * 1024};
  return small;
}

}  // namespace fastinfer::cuda
