// The tiles of tokens of a matrix product with a stack of experts: how many rows an expert gets is known on the GPU
// alone, so a kernel lists them, in the product's workspace.
#pragma once

#include "gemm/gemm.h"

namespace fastinfer::cuda {

// Before the product, on the same stream.
void list_expert_tiles(const GemmParams& params, void* stream);

// The first entry's `expert` is the number of tiles, which follow.
FASTINFER_HOST_DEVICE inline ExpertTile* expert_tiles(const GemmParams& p) {
  return static_cast<ExpertTile*>(p.workspace);
}

}  // namespace fastinfer::cuda
