// The kernel of paged attention for one kind of cache, and its launch; see paged_attention.cu.
#pragma once

#include "attention/paged_attention_decode_cuda.h"
#include "attention/paged_attention_prefill_cuda.h"
#include "attention/paged_attention_prefill_wgmma_cuda.h"
#include "common/cuda/launch.h"

namespace fastinfer::cuda {

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
    const PlanView plan(p.plan, p.blocks, p.lens());
    const bool cuts = plan.header->units_per_block > 0;  // read again: registers are scarce below
    if (cuts && WorkItem(p, cursor.at, cursor.units).decodes()) {
      decode<T, kKind, kHeadDim>(p, cursor);
    } else {
      prefill<T, kKind, kHeadDim>(p, cursor);
    }
  }
}

template <class T, CacheQuantization kKind>
void launch_paged_attention(const PagedAttentionParams& p, void* stream) {
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

}  // namespace fastinfer::cuda
