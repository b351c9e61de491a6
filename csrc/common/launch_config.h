// How a kernel is launched, and on what: plain data without CUDA, so that launch policies compile, are printed and are
// tested anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastinfer::cuda {

struct LaunchConfig {
  int64_t grid;             // blocks, x
  unsigned block;           // threads
  size_t shared_bytes = 0;  // dynamic
  unsigned grid_y = 1;
  bool dependent = false;  // may start before the kernel before it has ended: see grid_dependency_wait
};

struct Device {
  int arch;  // 80, 86, 89, 90, ...
  int multiprocessors;
  size_t shared_bytes;  // most that a block may have
};

inline constexpr size_t kDefaultSharedBytes = 48 * 1024;  // more must be asked for

inline void check_grid(const char* name, const LaunchConfig& config) {
  if (config.grid > INT32_MAX) throw std::runtime_error(std::string(name) + ": more than 2^31 - 1 blocks are needed");
  if (config.grid_y > 65535)
    throw std::runtime_error(std::string(name) + ": more than 65535 blocks are needed along y");
}

}  // namespace fastinfer::cuda
