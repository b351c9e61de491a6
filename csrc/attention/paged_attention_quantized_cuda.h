// Attention over a quantised cache, which is compiled on its own: it takes long.
#pragma once

#include "attention/paged_attention.h"

namespace fastinfer::cuda {

void paged_quantized_attention(const PagedAttentionParams& params, void* stream);

}  // namespace fastinfer::cuda
