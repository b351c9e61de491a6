// Attention whose values are the first elements of the keys.
#pragma once

#include "attention/paged_attention.h"

namespace fastinfer::cuda {

void paged_latent_attention(const PagedAttentionParams& params, void* stream);

}  // namespace fastinfer::cuda
