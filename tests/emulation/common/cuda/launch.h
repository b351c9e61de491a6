// csrc/common/cuda/launch.h on the emulator.
#pragma once

#include <memory>
#include <tuple>

#include "common/launch_config.h"
#include "emulator.h"

namespace fastinfer::cuda {

template <class... KernelArgs, class... Args>
void launch(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config, void* /*stream*/,
            const Args&... args) {
  if (config.grid == 0 || config.grid_y == 0) return;
  check_grid(name, config);
  struct Call {
    void (*kernel)(KernelArgs...);
    std::tuple<KernelArgs...> arguments;
  };
  const auto call = std::make_shared<const Call>(Call{kernel, std::tuple<KernelArgs...>(args...)});
  const auto body = [](const void* closure) {
    const Call& own = *static_cast<const Call*>(closure);
    std::apply(own.kernel, own.arguments);
  };
  emulation::run(
      {
          .name = name,
          .grid_x = static_cast<unsigned>(config.grid),
          .grid_y = config.grid_y,
          .threads = config.block,
          .shared_bytes = config.shared_bytes,
          .dependent = config.dependent,
          .arguments = &call->arguments,
          .argument_bytes = sizeof call->arguments,
          .body = body,
          .closure = call.get(),
      },
      call);
}

}  // namespace fastinfer::cuda
