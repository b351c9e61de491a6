#include "attention/store_value_codes.h"

#include "attention/kv_cache_binding.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void store_value_codes(const Tensor& codes, const Tensor& v_cache, std::optional<Tensor> v_scale,
                       const Tensor& slot_mapping) {
  const Checks check("store_value_codes", codes);
  check.shape(codes, "codes", {kAny, kAny, kAny, kAny});
  const int64_t blocks = codes.size(0), heads = codes.size(1), block_size = codes.size(3);
  const int64_t head_dim = (codes.size(2) - 1) * kKeyCodesPerWord, tokens = slot_mapping.numel();
  check.require(block_size > 0 && block_size % kKeyCodesPerWord == 0 && head_dim > 0,
                "codes must have a block size that is a multiple of 8 and at least two words, got ",
                format_shape(codes.sizes()));
  check.shape(v_cache, "v_cache", {blocks, block_size, heads, cache_columns(check, v_cache, "codes", head_dim)});
  check.shape(slot_mapping, "slot_mapping", {tokens});
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.dtype(codes, "codes", ScalarType::Int);
  for (const auto& [t, name] : {std::pair{&v_cache, "v_cache"}, {&slot_mapping, "slot_mapping"}, {&codes, "codes"}}) {
    check.contiguous(*t, name);
  }
  const CacheQuantization quantization = cache_quantization(v_cache);
  const bool quantized = quantization != CacheQuantization::kNone;
  const StoreValueCodesParams params{
      .v_cache = v_cache.data_ptr(),
      .v_scale = cache_scales(check, v_scale, "v_scale", v_cache, head_dim, kInt4ValueGroup),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr()),
      .codes = static_cast<uint32_t*>(codes.data_ptr()),
      .tokens = tokens,
      .slots = blocks * block_size,
      .block_size = static_cast<int>(block_size),
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .cache_dtype = quantized ? DType::kFloat32 : check.float_dtype(v_cache, "v_cache"),
  };
  for (int64_t i = 0; i < tokens; ++i) {
    check.require(params.slot_mapping[i] >= -1 && params.slot_mapping[i] < params.slots, "slot_mapping[", i,
                  "] must be in -1..", params.slots - 1, ", got ", params.slot_mapping[i]);
  }
  cpu::launch(&cpu::store_value_codes, params);
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("store_value_codes", TORCH_BOX(&store_value_codes));
}

}  // namespace fastinfer
