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

#include "attention/paged_attention_decode_cuda.h"
#include "attention/paged_attention_latent_cuda.h"
#include "attention/paged_attention_prefill_cuda.h"
#include "attention/paged_attention_prefill_wgmma_cuda.h"
#include "common/cuda/launch.h"

namespace fastinfer::cuda {
namespace {

// Does the item at the cursor, and moves it on.
template <class T, CacheQuantization kKind, int kHeadDim>
__device__ void prefill(const PagedAttentionParams& p, WorkCursor& cursor) {
  constexpr bool kWgmma = kHasWgmma && prefill_by_warpgroups(kHeadDim);
  using Attention = std::conditional_t<kWgmma, WgmmaPrefillAttention<T, kKind, kHeadDim>,  //
                                       PrefillAttention<T, kKind, kHeadDim>>;
  Attention::run(p, WorkItem(p, cursor.at, cursor.units));
  // Made again: registers are scarce in the loop over the tiles.
  WorkPosition at = cursor.at;
  at.seq = static_cast<int>(opaque(at.seq));
  const WorkItem item(p, at, cursor.units);
  write_results<T, kHeadDim, false>(p, item, cursor.units, PrefillShared<T, kKind, kHeadDim>::results(), 1);
  __syncthreads();  // shared memory is used again
  cursor.next(p, item.tiles);
}

template <class T, CacheQuantization kKind, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  WorkCursor cursor = WorkCursor::first(p);
  while (!cursor.ended()) {
    const PlanView plan(p.plan, p.blocks, p.seqs);
    const bool cuts = plan.header->units_per_block > 0;  // read again: registers are scarce below
    if (cuts && WorkItem(p, cursor.at, cursor.units).decodes()) {
      decode<T, kKind, kHeadDim>(p, cursor);
    } else {
      prefill<T, kKind, kHeadDim>(p, cursor);
    }
  }
}

template <class T, CacheQuantization kKind>
void launch_head_dim(const PagedAttentionParams& p, void* stream) {
  const auto run = [&]<int kHeadDim>() {
    launch("paged_attention", paged_attention_kernel<T, kKind, kHeadDim>, attention_launch(kHeadDim, p.blocks), stream,
           p);
  };
  switch (p.head_dim) {
    case 64: return run.template operator()<64>();
    case 80: return run.template operator()<80>();
    case 96: return run.template operator()<96>();
    case 128: return run.template operator()<128>();
    case 256: return run.template operator()<256>();
    default: return run.template operator()<512>();
  }
}

template <class T>
void launch_kind(const PagedAttentionParams& p, void* stream) {
  switch (p.quantization) {
    case CacheQuantization::kNone: return launch_head_dim<T, CacheQuantization::kNone>(p, stream);
    case CacheQuantization::kInt8: return launch_head_dim<T, CacheQuantization::kInt8>(p, stream);
    case CacheQuantization::kFp8: return launch_head_dim<T, CacheQuantization::kFp8>(p, stream);
    default: return launch_head_dim<T, CacheQuantization::kInt4>(p, stream);
  }
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, void* stream) {
  if (has_latents(p.head_dim)) return paged_latent_attention(p, stream);
  p.dtype == DType::kFloat16 ? launch_kind<__half>(p, stream) : launch_kind<__nv_bfloat16>(p, stream);
}

}  // namespace fastinfer::cuda
