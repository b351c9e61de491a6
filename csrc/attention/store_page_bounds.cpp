#include "attention/store_page_bounds.h"

#include "attention/kv_cache_binding.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void check_slots(const Checks& check, const StorePageBoundsParams& p) {
  for (int64_t i = 0; i < p.tokens; ++i) {
    check.require(p.slot_mapping[i] >= -1 && p.slot_mapping[i] < p.slots, "slot_mapping[", i, "] must be in -1..",
                  p.slots - 1, ", got ", p.slot_mapping[i]);
  }
}

// The kernel reads and writes eight elements at once.
void check_cuda(const Checks& check, const StorePageBoundsParams& p) {
  check.require(p.head_dim % 8 == 0, "bounds must have a head_dim that is a multiple of 8 on CUDA, got ", p.head_dim);
  check.require(reinterpret_cast<uintptr_t>(p.bounds) % 16 == 0, "bounds must be aligned to 16 bytes");
  check.require(reinterpret_cast<uintptr_t>(p.k_cache) % 16 == 0, "k_cache must be aligned to 16 bytes");
}

void store_page_bounds(const Tensor& bounds, const Tensor& k_cache, std::optional<Tensor> k_scale,
                       const Tensor& slot_mapping) {
  const Checks check("store_page_bounds", bounds);
  check.shape(bounds, "bounds", {kAny, kAny, 2, kAny});
  const int64_t blocks = bounds.size(0), heads = bounds.size(1), head_dim = bounds.size(3);
  check.shape(k_cache, "k_cache", {blocks, kAny, heads, cache_columns(check, k_cache, "bounds", head_dim)});
  const int64_t block_size = k_cache.size(1), tokens = slot_mapping.numel();
  check.require(block_size > 0 && head_dim > 0, "k_cache must have a block size and a head size, got ",
                format_shape(k_cache.sizes()));
  check.shape(slot_mapping, "slot_mapping", {tokens});
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.dtype(bounds, "bounds", ScalarType::BFloat16);
  for (const auto& [t, name] : {std::pair{&k_cache, "k_cache"}, {&slot_mapping, "slot_mapping"}, {&bounds, "bounds"}}) {
    check.contiguous(*t, name);
  }
  const CacheQuantization quantization = cache_quantization(k_cache);
  const bool quantized = quantization != CacheQuantization::kNone;
  const StorePageBoundsParams params{
      .k_cache = k_cache.data_ptr(),
      .k_scale = cache_scales(check, k_scale, "k_scale", k_cache, head_dim, kInt4KeyGroup),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr()),
      .bounds = static_cast<BFloat16*>(bounds.data_ptr()),
      .tokens = tokens,
      .slots = blocks * block_size,
      .block_size = static_cast<int>(block_size),
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .cache_dtype = quantized ? DType::kFloat32 : check.float_dtype(k_cache, "k_cache"),
  };
  if (gpu_of(bounds) == nullptr) {
    check_slots(check, params);
  } else {
    check_cuda(check, params);
  }
  FASTINFER_LAUNCH(bounds, store_page_bounds, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("store_page_bounds", TORCH_BOX(&store_page_bounds));
}

}  // namespace fastinfer
