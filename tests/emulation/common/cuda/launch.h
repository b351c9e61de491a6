// csrc/common/cuda/launch.h on the emulator.
#pragma once

#include <tuple>

#include "common/launch_config.h"
#include "emulator.h"

namespace fastinfer::cuda {

template <class... KernelArgs, class... Args>
void launch(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config, void* /*stream*/,
            const Args&... args) {
  if (config.grid == 0 || config.grid_y == 0) return;
  check_grid(name, config);
  const std::tuple<KernelArgs...> arguments(args...);
  const auto body = [&] { std::apply(kernel, arguments); };
  emulation::run({
      .name = name,
      .grid_x = static_cast<unsigned>(config.grid),
      .grid_y = config.grid_y,
      .threads = config.block,
      .shared_bytes = config.shared_bytes,
      .dependent = config.dependent,
      .arguments = &arguments,
      .argument_bytes = sizeof arguments,
      .body = [](const void* closure) { (*static_cast<decltype(&body)>(closure))(); },
      .closure = &body,
  });
}

}  // namespace fastinfer::cuda
