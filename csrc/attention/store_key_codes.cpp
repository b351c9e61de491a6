#include "attention/store_key_codes.h"

#include "attention/kv_cache_binding.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void check_slots(const Checks& check, const StoreKeyCodesParams& p) {
  for (int64_t i = 0; i < p.tokens; ++i) {
    check.require(p.slot_mapping[i] >= -1 && p.slot_mapping[i] < p.slots, "slot_mapping[", i, "] must be in -1..",
                  p.slots - 1, ", got ", p.slot_mapping[i]);
  }
}

void check_cuda(const Checks& check, const StoreKeyCodesParams& p) {
  check.require(p.head_dim <= cuda::kMaxKeyCodeDim, "k_cache must have a head_dim of at most ", cuda::kMaxKeyCodeDim,
                " on CUDA, got ", p.head_dim);
  check.require(reinterpret_cast<uintptr_t>(p.k_cache) % 16 == 0, "k_cache must be aligned to 16 bytes");
}

void store_key_codes(const Tensor& codes, const Tensor& k_cache, std::optional<Tensor> k_scale,
                     const Tensor& slot_mapping) {
  const Checks check("store_key_codes", codes);
  check.shape(codes, "codes", {kAny, kAny, kAny, kAny});
  const int64_t blocks = codes.size(0), heads = codes.size(1), block_size = codes.size(3);
  const int64_t head_dim = (codes.size(2) - 1) * kKeyCodesPerWord, tokens = slot_mapping.numel();
  check.require(block_size > 0 && head_dim > 0, "codes must have a block size and at least two words, got ",
                format_shape(codes.sizes()));
  check.shape(k_cache, "k_cache", {blocks, block_size, heads, cache_columns(check, k_cache, "codes", head_dim)});
  check.shape(slot_mapping, "slot_mapping", {tokens});
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.dtype(codes, "codes", ScalarType::Int);
  for (const auto& [t, name] : {std::pair{&k_cache, "k_cache"}, {&slot_mapping, "slot_mapping"}, {&codes, "codes"}}) {
    check.contiguous(*t, name);
  }
  const CacheQuantization quantization = cache_quantization(k_cache);
  const bool quantized = quantization != CacheQuantization::kNone;
  const StoreKeyCodesParams params{
      .k_cache = k_cache.data_ptr(),
      .k_scale = cache_scales(check, k_scale, "k_scale", k_cache, head_dim, kInt4KeyGroup),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr()),
      .codes = static_cast<uint32_t*>(codes.data_ptr()),
      .tokens = tokens,
      .slots = blocks * block_size,
      .block_size = static_cast<int>(block_size),
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .cache_dtype = quantized ? DType::kFloat32 : check.float_dtype(k_cache, "k_cache"),
  };
  if (gpu_of(codes) == nullptr) {
    check_slots(check, params);
  } else {
    check_cuda(check, params);
  }
  FASTINFER_LAUNCH(codes, store_key_codes, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("store_key_codes", TORCH_BOX(&store_key_codes));
}

}  // namespace fastinfer
