// Paged attention over a quantised cache on the GPU; see paged_attention.cu.
#include "attention/paged_attention_quantized_cuda.h"

#include "attention/paged_attention_kernel_cuda.h"

namespace fastinfer::cuda {
namespace {

template <class T>
void launch_kind(const PagedAttentionParams& p, void* stream) {
  switch (p.quantization) {
    case CacheQuantization::kInt8: return launch_paged_attention<T, CacheQuantization::kInt8>(p, stream);
    case CacheQuantization::kFp8: return launch_paged_attention<T, CacheQuantization::kFp8>(p, stream);
    default: return launch_paged_attention<T, CacheQuantization::kInt4>(p, stream);
  }
}

}  // namespace

void paged_quantized_attention(const PagedAttentionParams& p, void* stream) {
  p.dtype == DType::kFloat16 ? launch_kind<__half>(p, stream) : launch_kind<__nv_bfloat16>(p, stream);
}

}  // namespace fastinfer::cuda
