// Whether the GPU's kernels may let a token's result depend on its company: on how many tokens there are, where it
// stands among them, and which sequences are beside its own. The CPU's never do.
#pragma once

namespace fastinfer {

// What fastinfer.ops.batch_invariant() has set for this thread; launch policies ask for it.
bool batch_invariant();

}  // namespace fastinfer
