#include "rotary/rotary_embedding.h"

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

void rotary_embedding(const Tensor& q, const Tensor& k, const Tensor& positions, const Tensor& cos_sin_cache,
                      bool interleaved) {
  const Checks check("rotary_embedding", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), head_dim = q.size(2);
  check.shape(k, "k", {tokens, kAny, head_dim});
  check.shape(positions, "positions", {tokens});
  check.shape(cos_sin_cache, "cos_sin_cache", {kAny, kAny});
  const int64_t max_position = cos_sin_cache.size(0), rotary_dim = cos_sin_cache.size(1);
  check.require(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                "cos_sin_cache must have an even number of columns up to head_dim = ", head_dim, ", got ", rotary_dim);
  const DType dtype = check.float_dtype(q, "q");
  check.dtype(k, "k", q.scalar_type());
  check.dtype(positions, "positions", ScalarType::Long);
  check.dtype(cos_sin_cache, "cos_sin_cache", ScalarType::Float);
  check.rows_contiguous(q, "q");
  check.rows_contiguous(k, "k");
  check.rows_apart(q, "q");
  check.rows_apart(k, "k");
  check.contiguous(positions, "positions");
  check.contiguous(cos_sin_cache, "cos_sin_cache");
  const auto* position = static_cast<const int64_t*>(positions.data_ptr());
  if (gpu_of(q) == nullptr) {
    for (int64_t i = 0; i < tokens; ++i) {
      check.require(position[i] >= 0 && position[i] < max_position, "positions[", i, "] must be in 0..",
                    max_position - 1, ", got ", position[i]);
    }
  }
  const RotaryEmbeddingParams params{
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .positions = position,
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.data_ptr()),
      .tokens = tokens,
      .q_stride = q.stride(0),
      .k_stride = k.stride(0),
      .max_position = max_position,
      .q_heads = static_cast<int>(q.size(1)),
      .kv_heads = static_cast<int>(k.size(1)),
      .head_dim = static_cast<int>(head_dim),
      .rotary_dim = static_cast<int>(rotary_dim),
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
