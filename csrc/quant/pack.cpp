// Bindings of int4_pack, int5_pack, int6_pack, int8_pack, and of int4_dequantize to int8_dequantize.
#include "quant/pack.h"

#include "binding/output.h"
#include "quant/quantized_weight_binding.h"

namespace fastinfer {
namespace {

template <int kBits>
Tensor pack(const Output& output, const Tensor& q) {
  const Checks check(kBits == 4 ? "int4_pack" : kBits == 5 ? "int5_pack" : kBits == 6 ? "int6_pack" : "int8_pack", q);
  check.shape(q, "q", {kAny, kAny});
  check.dtype(q, "q", kBits < 6 ? ScalarType::Byte : ScalarType::Char);
  check.contiguous(q, "q");
  const int64_t n = q.size(0), k = q.size(1);
  check.require(n > 0 && k > 0 && k % kBlockInputs == 0, "q must have rows, and a multiple of ", kBlockInputs,
                " columns, got ", format_shape(q.sizes()));
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  const ScalarType dtype = kBits == 8 ? ScalarType::Char : ScalarType::Byte;
  const Tensor out = output.tensor(check, q, {tiles, k / kBlockInputs, packed_steps(kBits), kTileRows, 4}, dtype);
  const bool aligned = reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0;
  check.require(aligned || gpu_of(q) == nullptr, "out must be aligned to 16 bytes on a GPU");
  const PackParams params{.q = q.data_ptr(), .out = out.data_ptr(), .n = n, .k = k, .bits = kBits};
  FASTINFER_LAUNCH(q, pack, params);
  return out;
}

template <int kBits>
Tensor dequantize(const Output& output, const Tensor& qweight, const Tensor& scales, const std::optional<Tensor>& mins,
                  int64_t out_features, const std::optional<Tensor>& rows, ScalarType dtype) {
  const Checks check(kBits == 4   ? "int4_dequantize"
                     : kBits == 5 ? "int5_dequantize"
                     : kBits == 6 ? "int6_dequantize"
                                  : "int8_dequantize",
                     qweight);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, mins, out_features, kBits);
  const DType out_dtype = check.float_dtype(dtype, "dtype");
  int64_t count = out_features;
  const int64_t* row = nullptr;
  if (rows) {
    check.shape(*rows, "rows", {kAny});
    check.dtype(*rows, "rows", ScalarType::Long);
    check.contiguous(*rows, "rows");
    count = rows->size(0);
    row = static_cast<const int64_t*>(rows->data_ptr());
    for (int64_t i = 0; gpu_of(qweight) == nullptr && i < count; ++i) {
      check.require(row[i] >= 0 && row[i] < out_features, "rows[", i, "] must be in 0..", out_features - 1, ", got ",
                    row[i]);
    }
  }
  const int64_t k = qweight.size(1) * kBlockInputs;
  const Tensor out = output.tensor(check, qweight, {count, k}, dtype);
  const DequantizeParams params{
      .weight = weight,
      .rows = row,
      .out = out.data_ptr(),
      .count = count,
      .n = out_features,
      .k = k,
      .bits = kBits,
      .dtype = out_dtype,
  };
  FASTINFER_LAUNCH(qweight, dequantize, params);
  return out;
}

Tensor int6_dequantize(const Output& output, const Tensor& qweight, const Tensor& scales, int64_t out_features,
                       const std::optional<Tensor>& rows, ScalarType dtype) {
  return dequantize<6>(output, qweight, scales, std::nullopt, out_features, rows, dtype);
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  impl_with_out<&pack<5>>(m, "int5_pack");
  impl_with_out<&dequantize<5>>(m, "int5_dequantize");
  impl_with_out<&pack<6>>(m, "int6_pack");
  impl_with_out<&int6_dequantize>(m, "int6_dequantize");
}

FASTINFER_OPERATORS(m) {
  impl_with_out<&pack<4>>(m, "int4_pack");
  impl_with_out<&pack<8>>(m, "int8_pack");
  impl_with_out<&dequantize<4>>(m, "int4_dequantize");
  impl_with_out<&dequantize<8>>(m, "int8_dequantize");
}

}  // namespace fastinfer
