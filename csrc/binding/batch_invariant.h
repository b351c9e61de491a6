// Batch invariance on GPUs: rounding of a token's result then does not depend on the rest of the batch (how many tokens
// there are, their order, and the other sequences). On the CPU it never does.
#pragma once

namespace fastinfer {

// The value that fastinfer.ops.batch_invariant() has set for this thread. Launch policies read it.
bool batch_invariant();

}  // namespace fastinfer
