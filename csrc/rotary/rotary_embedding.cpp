#include "rotary/rotary_embedding.h"

#include "rotary/rotary_binding.h"

namespace fastinfer {
namespace {

void rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache,
                      bool interleaved) {
  const Checks check("rotary_embedding", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), head_dim = q.size(2);
  check.shape(k, "k", {tokens, kAny, head_dim});
  const DType dtype = check.float_dtype(q, "q");
  check.dtype(k, "k", q.scalar_type());
  check.rows_contiguous(q, "q");
  check.rows_contiguous(k, "k");
  check.rows_apart(q, "q");
  check.rows_apart(k, "k");
  check_rotary(check, positions, cos_sin_cache, tokens, head_dim);
  const RotaryEmbeddingParams params{
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .positions = static_cast<const int64_t*>(positions.data_ptr()),
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.data_ptr()),
      .tokens = tokens,
      .q_stride = q.stride(0),
      .k_stride = k.stride(0),
      .max_position = cos_sin_cache.size(0),
      .q_heads = static_cast<int>(q.size(1)),
      .kv_heads = static_cast<int>(k.size(1)),
      .head_dim = static_cast<int>(head_dim),
      .rotary_dim = static_cast<int>(cos_sin_cache.size(1)),
      .interleaved = interleaved,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(q, rotary_embedding, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}

}  // namespace fastinfer
