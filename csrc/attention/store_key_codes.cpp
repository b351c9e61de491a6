#include "attention/store_key_codes.h"

#include "attention/store_codes_binding.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void check_cuda(const Checks& check, const StoreCodesParams& p) {
  check.require(p.head_dim <= cuda::kMaxKeyCodeDim, "k_cache must have a head_dim of at most ", cuda::kMaxKeyCodeDim,
                " on CUDA, got ", p.head_dim);
  check.require(reinterpret_cast<uintptr_t>(p.cache) % 16 == 0, "k_cache must be aligned to 16 bytes");
}

void store_key_codes(const Tensor& codes, const Tensor& k_cache, std::optional<Tensor> k_scale,
                     const Tensor& slot_mapping) {
  const Checks check("store_key_codes", codes);
  check.shape(codes, "codes", {kAny, kAny, kAny, kAny});
  check.require(codes.size(3) > 0 && codes.size(2) > 1, "codes must have a block size and at least two words, got ",
                format_shape(codes.sizes()));
  const StoreCodesParams params =
      store_codes_params(check, codes, k_cache, "k_cache", k_scale, "k_scale", slot_mapping, kInt4KeyGroup);
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
