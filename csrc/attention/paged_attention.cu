// Paged attention on the GPU: flash attention whose blocks share the whole batch's work evenly, however ragged.
//
//   plan (once per step): the line of work units, and where each block's stretch of it begins; or, if no row tile is
//   cut, how many there are, which blocks then take in turn
//   each block, for each row tile in its stretch, or that it takes:
//     O, maximum, sum = flash attention over its KV tiles
//       up to 16 rows, if there are stretches: shared by warps  paged_attention_decode_cuda.h
//       else a warp has rows of its own                         paged_attention_prefill_cuda.h
//       the same on sm_90a, at head sizes 64 and 128            paged_attention_prefill_wgmma_cuda.h
//       values in the keys: the warps share columns, too        paged_attention_latent.cu
//     all of the row tile's tiles were in the stretch?  ->  out       paged_attention_results_cuda.h
//     else  ->  workspace; the block that comes last merges all parts, in their order, ->  out
//
// The order of sums depends on the plan, and so on the batch unless that is batch-invariant, but never on timing. After
// FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691); the even stretches after Stream-K (Osama et al.,
// 2023, https://arxiv.org/abs/2301.03598).
#include "attention/paged_attention.h"

#include "attention/paged_attention_kernel_cuda.h"
#include "attention/paged_attention_latent_cuda.h"
#include "attention/paged_attention_quantized_cuda.h"

namespace fastinfer::cuda {

void paged_attention(const PagedAttentionParams& p, void* stream) {
  if (has_latents(p.head_dim)) return paged_latent_attention(p, stream);
  if (p.quantization != CacheQuantization::kNone) return paged_quantized_attention(p, stream);
  p.dtype == DType::kFloat16 ? launch_paged_attention<__half, CacheQuantization::kNone>(p, stream)
                             : launch_paged_attention<__nv_bfloat16, CacheQuantization::kNone>(p, stream);
}

}  // namespace fastinfer::cuda
