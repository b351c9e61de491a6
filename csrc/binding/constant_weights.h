// A promise about weights, by which GPU kernels read them before the kernel before them has ended.
#pragma once

namespace fastinfer {

// The value that fastinfer.ops.constant_weights() has set for this thread. Bindings pass it on to kernels.
bool constant_weights();

}  // namespace fastinfer
