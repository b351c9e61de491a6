#include "attention/store_value_codes.h"

#include "attention/store_codes_binding.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void store_value_codes(const Tensor& codes, const Tensor& v_cache, std::optional<Tensor> v_scale,
                       const Tensor& slot_mapping) {
  const Checks check("store_value_codes", codes);
  check.shape(codes, "codes", {kAny, kAny, kAny, kAny});
  check.require(codes.size(3) > 0 && codes.size(3) % kKeyCodesPerWord == 0 && codes.size(2) > 1,
                "codes must have a block size that is a multiple of 8 and at least two words, got ",
                format_shape(codes.sizes()));
  const StoreCodesParams params =
      store_codes_params(check, codes, v_cache, "v_cache", v_scale, "v_scale", slot_mapping, kInt4ValueGroup);
  check_slots(check, params);
  cpu::launch(&cpu::store_value_codes, params);
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("store_value_codes", TORCH_BOX(&store_value_codes));
}

}  // namespace fastinfer
