// A 4-bit linear layer behind an RMSNorm on plain memory: no torch, no Python. Prints how far the result is from loops
// in double precision, and fails where that is too far.
#include <fastinfer/common/cpu/isa.h>
#include <fastinfer/common/cpu/parallel.h>
#include <fastinfer/norm/rms_norm.h>
#include <fastinfer/quant/pack.h>
#include <fastinfer/quant/quantized_gemm.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 3, kIn = 512, kOut = 200, kGroup = 64;  // kGroup: inputs that share a scale
constexpr int64_t kGroups = kIn / kGroup;
constexpr float kEps = 1e-5f;

struct Layer {
  std::vector<float> norm_weight;  // [kIn]
  std::vector<uint8_t> q;          // [kOut, kIn], 0..15: the weight is scale * (q - 8)
  std::vector<float> scales;       // [kOut, kGroups]
};

// With the library. Launchers check nothing: sizes and layouts must be as their headers say.
std::vector<float> forward(const Layer& layer, const std::vector<float>& x) {
  using fastinfer::DType, fastinfer::kTileRows, fastinfer::kBlockInputs;

  // Once per weight: rows in tiles of 16, the last one padded.
  const int64_t tiles = (kOut + kTileRows - 1) / kTileRows;
  std::vector<uint8_t> packed(tiles * kTileRows * kIn / 2);
  fastinfer::cpu::pack({.q = layer.q.data(), .out = packed.data(), .n = kOut, .k = kIn, .bits = 4});
  std::vector<float> scales(tiles * kGroups * kTileRows);  // [tiles, kGroups, 16]
  for (int64_t row = 0; row < kOut; ++row) {
    for (int64_t group = 0; group < kGroups; ++group) {
      scales[(row / kTileRows * kGroups + group) * kTileRows + row % kTileRows] = layer.scales[row * kGroups + group];
    }
  }

  std::vector<float> normed(x.size()), out(kTokens * kOut);
  const fastinfer::RmsNormParams norm{
      .x = x.data(),
      .residual = nullptr,
      .addend = nullptr,
      .weight = layer.norm_weight.data(),
      .out = normed.data(),
      .scales = nullptr,
      .rows = kTokens,
      .hidden = kIn,
      .eps = kEps,
      .dtype = DType::kFloat32,
      .weight_dtype = DType::kFloat32,
  };
  fastinfer::cpu::rms_norm(norm);

  fastinfer::QuantizedGemmParams gemm{};
  gemm.x = normed.data();
  gemm.out = out.data();
  gemm.m = kTokens;
  gemm.n = kOut;
  gemm.k = kIn;
  gemm.x_stride = kIn;
  gemm.dtype = DType::kFloat32;
  gemm.weight.q = packed.data();
  gemm.weight.scales = scales.data();
  gemm.weight.scale_dtype = DType::kFloat32;
  gemm.weight.groups = kGroups;
  gemm.weight.group_blocks = kGroup / kBlockInputs;
  gemm.activation_bits = 32;
  fastinfer::cpu::int4_gemm(gemm);
  return out;
}

std::vector<double> reference(const Layer& layer, const std::vector<float>& x) {
  std::vector<double> out(kTokens * kOut);
  for (int64_t token = 0; token < kTokens; ++token) {
    const float* const row = &x[token * kIn];
    double squares = 0.0;
    for (int64_t i = 0; i < kIn; ++i) squares += double{row[i]} * row[i];
    const double norm = 1.0 / std::sqrt(squares / kIn + kEps);
    for (int64_t o = 0; o < kOut; ++o) {
      double sum = 0.0;
      for (int64_t i = 0; i < kIn; ++i) {
        const double weight = double{layer.scales[o * kGroups + i / kGroup]} * (layer.q[o * kIn + i] - 8);
        sum += row[i] * norm * layer.norm_weight[i] * weight;
      }
      out[token * kOut + o] = sum;
    }
  }
  return out;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::uniform_int_distribution<int> nibble(0, 15);
  Layer layer{std::vector<float>(kIn), std::vector<uint8_t>(kOut * kIn), std::vector<float>(kOut * kGroups)};
  std::vector<float> x(kTokens * kIn);
  for (float& value : x) value = uniform(random);
  for (float& value : layer.norm_weight) value = 1.0f + 0.1f * uniform(random);
  for (uint8_t& value : layer.q) value = static_cast<uint8_t>(nibble(random));
  for (float& value : layer.scales) value = 0.01f * (1.5f + uniform(random));

  const std::vector<float> out = forward(layer, x);
  const std::vector<double> expected = reference(layer, x);
  double error = 0.0, largest = 0.0;
  for (size_t i = 0; i < out.size(); ++i) {
    error = std::fmax(error, std::abs(out[i] - expected[i]));
    largest = std::fmax(largest, std::abs(expected[i]));
    if (std::isnan(out[i])) error = INFINITY;
  }
  std::printf("%s, %d threads: largest output %.3f, largest error %.1e\n",
              fastinfer::cpu::name(fastinfer::cpu::active_isa().isa), fastinfer::cpu::num_threads(), largest, error);
  return error < 1e-5 * largest ? 0 : 1;
}
