// Checks of a packed weight's tensors, shared by the bindings of the products and of dequantisation.
#pragma once

#include <cmath>

#include "binding/checks.h"
#include "binding/launch.h"
#include "gemm/gemm_binding.h"
#include "quant/quantized_gemm.h"

namespace fastinfer {

// Steps of a packed block, 64 bytes each.
inline int64_t packed_steps(int bits) {
  return kBlockInputs * bits / 32;
}

// Checks scales or minimums that are an int8 times an fp16, of a weight with `blocks` blocks of inputs.
inline void check_two_level(const Checks& check, const Tensor& scales, const char* name, int64_t tiles, int64_t blocks,
                            int bits) {
  const int64_t groups = bits == 6 ? TwoLevel<16>::kGroups : TwoLevel<32>::kGroups;
  check.require(gpu_of(scales) == nullptr, name, " must be float16 or float32 on a GPU, got int8");
  check.require(blocks * kBlockInputs % kTwoLevelInputs == 0, "in_features must be a multiple of ", kTwoLevelInputs,
                " for int8 ", name, ", got ", blocks * kBlockInputs);
  check.shape(scales, name, {tiles, blocks * kBlockInputs / kTwoLevelInputs, 2 + groups, kTileRows});
  check.dtype(scales, name, ScalarType::Char);
  check.contiguous(scales, name);
}

inline QuantizedWeight quantized_weight(const Checks& check, const Tensor& qweight, const Tensor& scales,
                                        const std::optional<Tensor>& mins, int64_t out_features, int bits) {
  check.shape(qweight, "qweight", {kAny, kAny, packed_steps(bits), kTileRows, 4});
  const int64_t tiles = qweight.size(0), blocks = qweight.size(1);
  check.require(tiles > 0 && blocks > 0, "qweight must not be empty, got ", format_shape(qweight.sizes()));
  check.require(out_features > (tiles - 1) * kTileRows && out_features <= tiles * kTileRows,
                "out_features must fit qweight's ", tiles, " tiles of ", kTileRows, " rows, got ", out_features);
  check.dtype(qweight, "qweight", bits == 8 ? ScalarType::Char : ScalarType::Byte);
  check.contiguous(qweight, "qweight");
  if (bits == 6 || (bits < 6 && scales.scalar_type() == ScalarType::Char)) {
    check_two_level(check, scales, "scales", tiles, blocks, bits);
    if (mins) check_two_level(check, *mins, "mins", tiles, blocks, bits);
    QuantizedWeight weight{};
    weight.q = qweight.data_ptr();
    weight.scales = scales.data_ptr();
    weight.mins = mins ? mins->data_ptr() : nullptr;
    weight.group_blocks = 1;
    weight.groups = 0;  // two levels
    return weight;
  }
  check.shape(scales, "scales", {tiles, kAny, kTileRows});
  const int64_t groups = scales.size(1);
  check.require(groups > 0 && blocks % groups == 0, "scales must have a number of groups that divides the ", blocks,
                " blocks of 32 inputs, got ", groups);
  const ScalarType dtype = scales.scalar_type();
  check.require(dtype == ScalarType::Half || dtype == ScalarType::Float, "scales must be float16 or float32, got ",
                name(dtype));
  check.contiguous(scales, "scales");
  if (mins) {
    check.shape(*mins, "mins", {tiles, groups, kTileRows});
    check.dtype(*mins, "mins", dtype);
    check.contiguous(*mins, "mins");
  }
  return {
      .q = qweight.data_ptr(),
      .scales = scales.data_ptr(),
      .mins = mins ? mins->data_ptr() : nullptr,
      .group_blocks = blocks / groups,
      .scale_dtype = dtype == ScalarType::Half ? DType::kFloat16 : DType::kFloat32,
      .groups = static_cast<int>(groups),
      .group_reciprocal = ((uint64_t{1} << 32) + blocks / groups - 1) / (blocks / groups),
  };
}

inline void check_activation_bits(const Checks& check, const Tensor& x, int64_t bits) {
  check.require(bits == 8 || bits == 16 || bits == 32, "activation_bits must be 8, 16 or 32, got ", bits);
  check.require(bits == 32 || gpu_of(x) == nullptr, "activation_bits must be 32 on a GPU, which takes x as it is, got ",
                bits);
}

// The first expert's slice is checked as a weight of its own; the others follow it.
inline QuantizedWeight stacked_weight(const Checks& check, const Tensor& qweight, const Tensor& scales,
                                      const std::optional<Tensor>& mins, int64_t out_features, int bits) {
  check.require(qweight.dim() == 6 && qweight.size(0) > 0,
                "qweight must be a stack of packed weights, [experts, tiles, blocks, steps, 16, 4], got ",
                format_shape(qweight.sizes()));
  const int64_t experts = qweight.size(0);
  check.contiguous(qweight, "qweight");
  const auto stacked = [&](const Tensor& t, const char* name) {
    if (t.scalar_type() == ScalarType::Char) {
      check.shape(t, name, {experts, kAny, kAny, kAny, kTileRows});
    } else {
      check.shape(t, name, {experts, kAny, kAny, kTileRows});
    }
    check.contiguous(t, name);
  };
  stacked(scales, "scales");
  if (mins) stacked(*mins, "mins");
  const auto first = [](const Tensor& t) { return torch::stable::select(t, 0, 0); };
  return quantized_weight(check, first(qweight), first(scales), mins ? std::optional(first(*mins)) : std::nullopt,
                          out_features, bits);
}

// The 16 entries of a table for activations of some bits.
inline const float* table_entries(const Checks& check, const Tensor& table, int64_t activation_bits) {
  check.shape(table, "table", {16});
  check.dtype(table, "table", ScalarType::Float);
  check.contiguous(table, "table");
  const auto* entries = static_cast<const float*>(table.data_ptr());
  if (activation_bits != 32) {
    for (const float* entry = entries; entry < entries + 16; ++entry) {
      check.require(*entry >= -128.0f && *entry <= 127.0f && *entry == std::nearbyint(*entry),
                    "table must have integers -128..127 with activation_bits of ", activation_bits, ", got ", *entry);
    }
  }
  return entries;
}

// A weight for look-up tables: its scales have one level.
inline void check_lut_scales(const Checks& check, const Tensor& scales) {
  check.require(scales.scalar_type() != ScalarType::Char, "scales must be float16 or float32, got int8");
}

inline void check_quantized_aligned(const Checks& check, const Tensor& qweight, const Tensor& scales,
                                    const std::optional<Tensor>& mins) {
  check_aligned(check, qweight, "qweight");
  check_aligned(check, scales, "scales");
  if (mins) check_aligned(check, *mins, "mins");
}

}  // namespace fastinfer
