#include "attention/store_kv_cache.h"

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

void store_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slot_mapping) {
  const Checks check("store_kv_cache", k);
  check.shape(k, "k", {kAny, kAny, kAny});
  const int64_t tokens = k.size(0), kv_heads = k.size(1), head_dim = k.size(2);
  check.shape(v, "v", {tokens, kv_heads, head_dim});
  check.shape(k_cache, "k_cache", {kAny, kAny, kv_heads, head_dim});
  check.shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), kv_heads, head_dim});
  check.shape(slot_mapping, "slot_mapping", {tokens});
  const DType dtype = check.float_dtype(k, "k"), cache_dtype = check.float_dtype(k_cache, "k_cache");
  check.dtype(v, "v", k.scalar_type());
  check.dtype(v_cache, "v_cache", k_cache.scalar_type());
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.rows_contiguous(k, "k");
  check.rows_contiguous(v, "v");
  check.contiguous(k_cache, "k_cache");
  check.contiguous(v_cache, "v_cache");
  check.contiguous(slot_mapping, "slot_mapping");
  const int64_t slots = k_cache.size(0) * k_cache.size(1);
  const auto* slot = static_cast<const int64_t*>(slot_mapping.data_ptr());
  for (int64_t i = 0; i < tokens; ++i) {
    check.require(slot[i] >= -1 && slot[i] < slots, "slot_mapping[", i, "] must be in -1..", slots - 1, ", got ",
                  slot[i]);
  }
  cpu::store_kv_cache({
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .k_cache = k_cache.data_ptr(),
      .v_cache = v_cache.data_ptr(),
      .slot_mapping = slot,
      .tokens = tokens,
      .k_stride = k.stride(0),
      .v_stride = v.stride(0),
      .slots = slots,
      .row = kv_heads * head_dim,
      .dtype = dtype,
      .cache_dtype = cache_dtype,
  });
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("store_kv_cache", TORCH_BOX(&store_kv_cache));
}

}  // namespace fastinfer
