#include "rotary/norm_rotary_store.h"

#include "attention/kv_cache_slots_binding.h"
#include "rotary/rotary_binding.h"

namespace fastinfer {
namespace {

const void* head_norm_weight(const Checks& check, const std::optional<Tensor>& weight, const char* name,
                             int64_t head_dim, DType activations, DType& dtype) {
  if (!weight) return nullptr;
  check.shape(*weight, name, {head_dim});
  check.contiguous(*weight, name);
  dtype = check.fp32_or(activations, *weight, name);
  return weight->data_ptr();
}

void norm_rotary_store(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> q_norm_weight,
                       std::optional<Tensor> k_norm_weight, double eps, const Tensor& positions,
                       const Tensor& cos_sin_cache, bool interleaved, const Tensor& k_cache, const Tensor& v_cache,
                       std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, const Tensor& slot_mapping,
                       bool norm_v, std::optional<Tensor> query_scales) {
  const Checks check("norm_rotary_store", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), head_dim = q.size(2);
  check.shape(k, "k", {tokens, kAny, head_dim});
  const int64_t heads = k.size(1);
  check.shape(v, "v", {tokens, heads, head_dim});
  const DType dtype = check.float_dtype(q, "q");
  check.dtype(k, "k", q.scalar_type());
  check.dtype(v, "v", q.scalar_type());
  check.rows_contiguous(q, "q");
  check.rows_contiguous(k, "k");
  check.rows_contiguous(v, "v");
  check.rows_apart(q, "q");
  check_rotary(check, positions, cos_sin_cache, tokens, head_dim);
  DType weight_dtype = DType::kFloat32, k_weight_dtype = DType::kFloat32;
  const void* q_weight = head_norm_weight(check, q_norm_weight, "q_norm_weight", head_dim, dtype, weight_dtype);
  const void* k_weight = head_norm_weight(check, k_norm_weight, "k_norm_weight", head_dim, dtype, k_weight_dtype);
  check.require(!q_weight || !k_weight || weight_dtype == k_weight_dtype,
                "k_norm_weight must have the dtype of q_norm_weight, got ",
                k_norm_weight ? name(k_norm_weight->scalar_type()) : "none");
  if (!q_weight) weight_dtype = k_weight_dtype;
  const NormRotaryStoreParams params{
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .q_norm_weight = q_weight,
      .k_norm_weight = k_weight,
      .positions = static_cast<const int64_t*>(positions.data_ptr()),
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.data_ptr()),
      .query_scales = checked_query_scales(check, query_scales, cos_sin_cache),
      .tokens = tokens,
      .q_stride = q.stride(0),
      .k_stride = k.stride(0),
      .v_stride = v.stride(0),
      .max_position = cos_sin_cache.size(0),
      .q_heads = static_cast<int>(q.size(1)),
      .rotary_dim = static_cast<int>(cos_sin_cache.size(1)),
      .eps = static_cast<float>(eps),
      .norm_v = norm_v,
      .interleaved = interleaved,
      .dtype = dtype,
      .weight_dtype = weight_dtype,
      .cache = kv_cache_slots(check, k_cache, v_cache, k_scale, v_scale, slot_mapping, tokens, heads, head_dim),
  };
  FASTINFER_LAUNCH(q, norm_rotary_store, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("norm_rotary_store", TORCH_BOX(&norm_rotary_store));
}

}  // namespace fastinfer
