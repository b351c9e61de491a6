// Packing runs once per weight; dequantising serves quantised embeddings, a few rows at a time. Both move bytes only,
// so a thread does one word of the packed form.
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "quant/pack.h"

namespace fastinfer::cuda {
namespace {

constexpr unsigned kThreads = 256;

// The place of a value within its block: the byte, and for 4 bits the nibble's shift.
struct Place {
  int byte;
  int shift;
};

__device__ Place place(int bits, int row, int input) {
  const int lane = 4 * (row % 8) + input % 16 / 4, half = input / 16, upper = row / 8;
  if (bits == 8) return {lane * 16 + half * 8 + upper * 4 + input % 4, 0};
  const int nibble = upper + input % 4 / 2 * 2 + input % 2 * 4;
  return {lane * 8 + half * 4 + nibble / 2, nibble % 2 * 4};
}

__device__ int64_t block_offset(int bits, int64_t row, int64_t input, int64_t k) {
  const int64_t block_bytes = kTileRows * kBlockInputs * bits / 8;
  return (row / kTileRows * (k / kBlockInputs) + input / kBlockInputs) * block_bytes;
}

// A thread packs four inputs of a row, for 4 bits those of rows r and r + 8, which share their word.
__global__ void pack_kernel(PackParams p) {
  const int64_t runs = p.k / 4, rows = (p.n + kTileRows - 1) / kTileRows * (p.bits == 4 ? 8 : 16);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * runs) return;
  const int64_t input = i % runs * 4;
  const int64_t row = p.bits == 8 ? i / runs : i / runs / 8 * kTileRows + i / runs % 8;
  const auto* q = static_cast<const uint8_t*>(p.q);
  uint32_t word = 0;
  const int members = p.bits == 4 ? 2 : 1;
  for (int member = 0; member < members; ++member) {
    const int64_t r = row + 8 * member;
    if (r >= p.n) continue;
    for (int j = 0; j < 4; ++j) {
      const uint32_t value = q[r * p.k + input + j];
      const Place at = place(p.bits, r % kTileRows, (input + j) % kBlockInputs);
      word |= (p.bits == 4 ? value & 0xf : value) << (at.byte % 4 * 8 + at.shift);
    }
  }
  const int byte = place(p.bits, row % kTileRows, input % kBlockInputs).byte / 4 * 4;
  auto* out = static_cast<uint8_t*>(p.out) + block_offset(p.bits, row, input, p.k) + byte;
  *reinterpret_cast<uint32_t*>(out) = word;
}

template <class Scale, class Out>
__global__ void dequantize_kernel(DequantizeParams p) {
  const int64_t row = p.rows != nullptr ? p.rows[blockIdx.x] : blockIdx.x;
  Out* out = static_cast<Out*>(p.out) + static_cast<int64_t>(blockIdx.x) * p.k;
  const bool valid = row >= 0 && row < p.n;
  const int64_t group = p.weight.group_blocks * kBlockInputs;
  const int64_t first_scale = row / kTileRows * (p.k / group) * kTileRows + row % kTileRows;
  const auto* scales = static_cast<const Scale*>(p.weight.scales);
  const auto* mins = static_cast<const Scale*>(p.weight.mins);
  for (int64_t input = threadIdx.x; input < p.k; input += blockDim.x) {
    float value = __int_as_float(0x7fc00000);  // a row that does not exist is NaN
    if (valid) {
      const Place at = place(p.bits, row % kTileRows, input % kBlockInputs);
      const auto* block = static_cast<const uint8_t*>(p.weight.q) + block_offset(p.bits, row, input, p.k);
      const int byte = block[at.byte];
      const int q = p.bits == 8 ? static_cast<int8_t>(byte) : (byte >> at.shift & 0xf) - (mins == nullptr ? 8 : 0);
      const int64_t s = first_scale + input / group * kTileRows;
      value = to_float(scales[s]) * static_cast<float>(q) + (mins != nullptr ? to_float(mins[s]) : 0.0f);
    }
    out[input] = from_float<Out>(value);
  }
}

}  // namespace

void pack(const PackParams& p, void* stream) {
  const int64_t rows = (p.n + kTileRows - 1) / kTileRows * (p.bits == 4 ? 8 : 16);
  const int64_t blocks = (rows * (p.k / 4) + kThreads - 1) / kThreads;
  launch("pack", pack_kernel, {.grid = blocks, .block = kThreads}, stream, p);
}

void dequantize(const DequantizeParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class Out>(Out) {
    const auto run = [&]<class Scale>(Scale) {
      launch("dequantize", dequantize_kernel<Scale, Out>, {.grid = p.count, .block = kThreads}, stream, p);
    };
    p.weight.scale_dtype == DType::kFloat16 ? run(__half{}) : run(float{});
  });
}

}  // namespace fastinfer::cuda
