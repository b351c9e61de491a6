// The scales and mins of a packed weight in the GPU's matrix product for more than 64 tokens
// (gemm/gemm_wide_kernel_cuda.h): its fragments become scale * q + min in 16 bits.
#pragma once

#include "common/cuda/ptx.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/gemm.h"

namespace fastinfer::cuda {

// Of kRowTiles row tiles, which a warp multiplies. Dense weights have none.
template <class Weight, class T, int kRowTiles>
class GemmWideScales {
  using Params = typename Weight::Params;
  static constexpr bool kDense = Weight::kFormat == WeightFormat::kDense;

 public:
  // Twice each, as a packed multiplication takes them: of rows g and g + 8 of the row tiles.
  struct Scales {
    uint32_t scale[kRowTiles][2], min[kRowTiles][2];
  };

  __device__ GemmWideScales(const Params& params, int first_row_tile)
      : p(params), place(opaque(first_row_tile * params.plan.chunk_groups * kTileRows + threadIdx.x % kWarpSize / 4)) {}

  // Those of a block; `chunk_scales` are in shared memory, and `first_block` is the chunk's first of all blocks.
  __device__ Scales load(const unsigned char* chunk_scales, int first_block, int block) const {
    Scales s{};
    if constexpr (!kDense) {
      int group = 0;  // in the stage
      if (p.plan.chunk_groups > 1) {
        const bool single = p.weight.group_blocks == 1;
        group = single ? block : p.weight.group_of(first_block + block) - p.weight.group_of(first_block);
      }
      load_rows(chunk_scales, group, s.scale);
      if (p.weight.mins != nullptr) load_rows(chunk_scales + p.plan.chunk_groups * kScaleBytes, group, s.min);
    }
    return s;
  }

  // Whether a row has one scale in a chunk, in fp16; and that of a chunk.
  __device__ bool has_one() const {
    if constexpr (kDense)
      return false;
    else
      return p.plan.chunk_groups == 1 && p.weight.scale_dtype == DType::kFloat16;
  }
  __device__ Scales load_one(const unsigned char* chunk_scales) const {
    Scales s{};
    load_rows_of<__half>(chunk_scales, 0, s.scale);
    if (p.weight.mins != nullptr) load_rows_of<__half>(chunk_scales + kScaleBytes, 0, s.min);
    return s;
  }

  // Scales the exact fragments of 16 inputs of the r-th row tile.
  __device__ static void apply(uint32_t (&a)[4], const Scales& s, int r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fma2<T>(a[i], s.scale[r][i % 2], s.min[r][i % 2]);
  }

 private:
  const Params& p;
  const unsigned place;  // of this lane's first scale in a stage's, an index

  __device__ void load_rows(const unsigned char* scales, int group, uint32_t (&to)[kRowTiles][2]) const {
    if (p.weight.scale_dtype == DType::kFloat16) {
      load_rows_of<__half>(scales, group, to);
    } else {
      load_rows_of<float>(scales, group, to);
    }
  }
  template <class S>
  __device__ void load_rows_of(const unsigned char* scales, int group, uint32_t (&to)[kRowTiles][2]) const {
    const auto* const from = reinterpret_cast<const S*>(scales) + (place + group * kTileRows);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = to_float(from[r * p.plan.chunk_groups * kTileRows + i * 8]);
        to[r][i] = pack2<T>(scale, scale);
      }
    }
  }
};

}  // namespace fastinfer::cuda
