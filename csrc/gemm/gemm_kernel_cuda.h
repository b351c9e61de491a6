// The GPU's matrix product: one pipeline and one main loop for every weight format (dense_weight_cuda.h,
// quant/*_dequantize_cuda.h).
//
// The weight is mma's M side and the tokens its N side, eight at a time, so that a single token wastes no tensor core
// time that memory would not have taken. Copies to shared memory run `stages - 1` chunks ahead, across the units'
// borders; in each chunk a warp takes some row tiles, tokens and blocks of 32 inputs:
//
//   up to 64 tokens  sums of a block are exact products of integers and x, added up in fp32; the fp32 scale multiplies
//                    them and min * sum(x) is added: nothing but the result is rounded to 16 bits. sum(x) is an mma
//                    with a matrix of ones.
//   more             the fragments become scale * q + min in 16 bits: the scale and the weight are each rounded once.
//
// With a stack of experts (ExpertRows) the tiles of tokens are those of one expert each, and their rows are gathered on
// the way in and scattered on the way out.
//
// With a norm and few tokens (unless results must not depend on their number), x * norm_weight is rounded to 16 bits on
// its way into the fragments, its squares are added up beside, and the sums are divided by the root mean square at the
// end.
#pragma once

#include "common/cuda/launch.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/expert_tiles.h"
#include "gemm/gemm_epilogue_cuda.h"

namespace fastinfer::cuda {

// A worker's place in the line of units and chunks. With a stack of experts the token tiles are those of a list.
template <bool kGrouped>
struct GemmPosition {
  int unit, chunk, row_unit, token_tile;
  ExpertTile expert_tile{};

  __device__ explicit GemmPosition(const GemmParams& p) : unit(blockIdx.x), chunk(0) {
    if (!kGrouped && p.plan.worker_chunks > 0) {
      const int first = blockIdx.x * p.plan.worker_chunks;
      unit = first / p.plan.chunks;
      chunk = first % p.plan.chunks;
    }
    locate(p);
  }

  __device__ void advance(const GemmParams& p) {
    if (++chunk < p.plan.chunks) return;
    chunk = 0;
    unit += !kGrouped && p.plan.worker_chunks > 0 ? 1 : p.plan.workers;
    locate(p);
  }

 private:
  __device__ void locate(const GemmParams& p) {
    const int token_tiles = kGrouped ? expert_tiles(p)->expert : p.plan.token_tiles;
    row_unit = unit / token_tiles;
    token_tile = unit % token_tiles;
    if constexpr (kGrouped) expert_tile = expert_tiles(p)[1 + token_tile];
  }
};

// Chunks of this worker.
template <bool kGrouped>
__device__ int worker_chunks(const GemmParams& p) {
  const GemmPlan& plan = p.plan;
  const int worker = blockIdx.x;
  if constexpr (kGrouped) {
    const int units = plan.units / plan.token_tiles * expert_tiles(p)->expert;  // the plan's are the most there can be
    return worker < units ? ((units - worker - 1) / plan.workers + 1) * plan.chunks : 0;
  }
  if (plan.worker_chunks == 0) return ((plan.units - worker - 1) / plan.workers + 1) * plan.chunks;
  return min(plan.worker_chunks, plan.units * plan.chunks - worker * plan.worker_chunks);
}

template <class Weight, class T, int kTokens, bool kGrouped>
struct GemmKernel {
  using Params = typename Weight::Params;
  static constexpr GemmTile kTile = gemm_tile(Weight::kFormat, kTokens);
  static constexpr bool kDense = Weight::kFormat == WeightFormat::kDense;
  static constexpr bool kExact = kTokens <= kMostExactTokens;
  static constexpr bool kNorm = kTokens <= kMostNormTokens && !kGrouped;
  static constexpr int kThreads = kTile.threads(), kStages = kTile.stages;
  static constexpr int kResident = gemm_resident(Weight::kFormat, kTokens);
  static constexpr int kChunk = kTile.chunk, kBlocks = kTile.blocks();
  static constexpr int kWarpsRows = kTile.warps_rows, kWarpsTokens = kTile.warps_tokens;
  static constexpr int kWarpsInputs = kTile.warps_inputs;
  static constexpr int kRowTiles = kGemmRowTiles / kWarpsRows;    // of a warp
  static constexpr int kTokenTiles = kTokens / 8 / kWarpsTokens;  // of a warp
  static constexpr int kRowBytes = shared_row_bytes(kChunk);
  static constexpr GemmStage kStage = gemm_stage(Weight::kFormat, kTokens, kChunk);
  static constexpr int kX = kStage.x, kNormWeights = kStage.norm, kScales = kStage.scales;  // places in a stage
  using Epilogue = GemmEpilogue<T, kTokens, kWarpsRows, kWarpsTokens, kWarpsInputs, kGrouped>;
  using Position = GemmPosition<kGrouped>;

  const Params& p;
  const Weight weight;
  const int warp_rows, warp_tokens, warp_inputs;
  typename Epilogue::Sums sums;

  __device__ explicit GemmKernel(const Params& params)
      : p(params),
        weight(params),
        warp_rows(threadIdx.x / kWarpSize % kWarpsRows),
        warp_tokens(threadIdx.x / kWarpSize / kWarpsRows % kWarpsTokens),
        warp_inputs(threadIdx.x / kWarpSize / kWarpsRows / kWarpsTokens) {}

  __device__ bool has_norm() const {
    return kNorm && p.norm_weight.data != nullptr;
  }

  // Group of a block of 32 inputs: a division by multiplication with 2^32 / group_blocks, rounded up, which is exact as
  // long as block * group_blocks < 2^32.
  __device__ int group_of(int block) const
    requires(!kDense)
  {
    return static_cast<int>(static_cast<uint64_t>(block) * p.weight.group_reciprocal >> 32);
  }

  // ---- copies into a stage ----

  // `bytes` of an array of `size` bytes, from byte `first`, 16 at a time; zeros past the array's end.
  __device__ static void copy_vector(unsigned char* to, const void* from, int64_t first, int bytes, int64_t size) {
#pragma unroll 1
    for (int i = opaque(threadIdx.x) * 16; i < bytes; i += kThreads * 16) {
      const bool valid = first + i < size;
      cp_async(to + i, static_cast<const unsigned char*>(from) + (valid ? first + i : 0), valid);
    }
  }

  // Scales or mins of the chunk's groups: a run of memory for each row tile, which a warp copies.
  __device__ void load_scales(unsigned char* to, const void* from, const Position& at) const
    requires(!kDense)
  {
    const int size = p.weight.scale_dtype == DType::kFloat16 ? 2 : 4;  // 16 scales are `size` pieces of 16 bytes
    const int pieces = p.plan.chunk_groups * size, row_pieces = p.weight.groups * size;
    const int thread = opaque(threadIdx.x), lane = thread % kWarpSize;
    const int piece = group_of(at.chunk * kBlocks) * size + lane;
    const int tiles = (static_cast<int>(p.n) + kTileRows - 1) / kTileRows;
    if (lane >= pieces) return;
    for (int i = thread / kWarpSize; i < kGemmRowTiles; i += kThreads / kWarpSize) {
      const int row_tile = at.row_unit * kGemmRowTiles + i;
      const bool valid = row_tile < tiles && piece < row_pieces;
      const int64_t offset =
          valid ? ((int64_t{at.expert_tile.expert} * tiles + row_tile) * row_pieces + piece) * 16 : 0;
      cp_async(to + (i * pieces + lane) * 16, static_cast<const unsigned char*>(from) + offset, valid);
    }
  }

  __device__ unsigned char* mins_of(unsigned char* scales) const {
    return scales + p.plan.chunk_groups * kScaleBytes;
  }

  __device__ void load_weight(unsigned char* stage, const Position& at) const {
    Weight::template load<kChunk, kThreads>(stage, p, at.expert_tile.expert, at.row_unit, at.chunk);
    if constexpr (!kDense) {
      load_scales(stage + kScales, p.weight.scales, at);
      if (p.weight.mins != nullptr) load_scales(mins_of(stage + kScales), p.weight.mins, at);
    }
    if (has_norm()) {
      const int size = p.norm_weight.dtype == DType::kFloat32 ? 4 : 2;
      copy_vector(stage + kNormWeights, p.norm_weight.data, at.chunk * kChunk * size, kChunk * size, p.k * size);
    }
  }

  __device__ void load_x(unsigned char* stage, const Position& at) const {
    constexpr int kPieces = kChunk / 8, kStep = kThreads / kPieces;
    const int thread = opaque(threadIdx.x), row = written_row(kChunk, thread / kPieces), piece = thread % kPieces;
    static_assert(kStep % 4 == 0);
    const int first = kGrouped ? at.expert_tile.begin : at.token_tile * kTokens;
    const int token = first + row, input = at.chunk * kChunk + piece * 8;
    const int m = kGrouped ? at.expert_tile.end : static_cast<int>(p.m), k = static_cast<int>(p.k);
    const T* x = static_cast<const T*>(p.x);
    const T* from = x + token * p.x_stride + input;
    unsigned char* to = stage + kX + row * kRowBytes + piece * 16;
#pragma unroll 1
    for (int i = 0; i < kTokens; i += kStep, from += kStep * p.x_stride, to += kStep * kRowBytes) {
      if (kStep > kTokens && row >= kTokens) break;
      const bool valid = token + i < m && input < k;
      if constexpr (kGrouped) {
        if (valid) from = x + p.expert_rows.x_row(token + i) * p.x_stride + input;
      }
      cp_async(to, valid ? from : x, valid);
    }
  }

  // ---- a stage's products ----

  // Scales or mins of rows g and g + 8 of a row tile, for the group that is `group` behind the chunk's first.
  __device__ float2 row_scales(const unsigned char* scales, int row_tile, int group) const
    requires(!kDense)
  {
    const int g = threadIdx.x % kWarpSize / 4, i = (row_tile * p.plan.chunk_groups + group) * kTileRows + g;
    if (p.weight.scale_dtype == DType::kFloat16) {
      const auto* s = reinterpret_cast<const __half*>(scales);
      return {to_float(s[i]), to_float(s[i + 8])};
    }
    const auto* s = reinterpret_cast<const float*>(scales);
    return {s[i], s[i + 8]};
  }

  // The norm weights of this lane's inputs of a block. In fp16 a sixteenth of them: x times a weight must not overflow.
  __device__ void load_norm(const unsigned char* norm, int block, float (&w)[2][4]) const {
    const int first = block * kBlockInputs + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = first + 16 * (i / 4) + i % 4;
      const float value = p.norm_weight.dtype == DType::kFloat32 ? reinterpret_cast<const float*>(norm)[at]
                                                                 : to_float(reinterpret_cast<const T*>(norm)[at]);
      w[i / 4][i % 4] = value * kNormScale<T>;
    }
  }

  __device__ static void normalise(uint32_t (&b)[2], const float (&w)[4], float& squares) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack2<T>(b[i]);
      squares += x.x * x.x + x.y * x.y;
      b[i] = pack2<T>(x.x * w[2 * i], x.y * w[2 * i + 1]);
    }
  }

  __device__ void multiply(unsigned char* stage, int chunk) {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int first_block = chunk * kBlocks;
    const int blocks = (static_cast<int>(p.k) + kBlockInputs - 1) / kBlockInputs - first_block;
    int first_group = 0;
    if constexpr (!kDense) first_group = group_of(first_block);
#pragma unroll 1
    for (int block = warp_inputs; block < min(kBlocks, blocks); block += kWarpsInputs) {
      Fragments a[kRowTiles];
      float2 scale[kRowTiles], shift[kRowTiles];
      bool has_min = false;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const int row_tile = warp_rows * kRowTiles + r;
        a[r] = weight.template fragments<kChunk>(stage, row_tile, block);
        if constexpr (!kDense) {
          has_min = p.weight.mins != nullptr;
          const int group = group_of(first_block + block) - first_group;
          scale[r] = row_scales(stage + kScales, row_tile, group);
          shift[r] = has_min ? row_scales(mins_of(stage + kScales), row_tile, group) : make_float2(0.0f, 0.0f);
          if constexpr (!kExact) scale_fragments(a[r], scale[r], shift[r]);
        }
      }
      float norm_weight[2][4];
      if (has_norm()) load_norm(stage + kNormWeights, block, norm_weight);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const int token = (warp_tokens * kTokenTiles + n) * 8 + g;
        const unsigned char* x = stage + kX + token * kRowBytes + (block * kBlockInputs + 4 * t) * 2;
        uint32_t b[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint2 inputs = *reinterpret_cast<const uint2*>(x + 32 * j);
          b[j][0] = inputs.x;
          b[j][1] = inputs.y;
          if constexpr (kNorm) {
            if (has_norm()) normalise(b[j], norm_weight[j], sums.squares[n]);
          }
        }
        if constexpr (kDense || !kExact) {
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            mma<T>(sums.value[r][n], a[r].a[0], b[0]);
            mma<T>(sums.value[r][n], a[r].a[1], b[1]);
          }
        } else {
          float total[4] = {};  // of x: the same in every row
          if (has_min) {
            constexpr uint32_t kOne = kOnes<T>;
            const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
            mma<T>(total, ones, b[0]);
            mma<T>(total, ones, b[1]);
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            float part[4] = {};
            mma<T>(part, a[r].a[0], b[0]);
            mma<T>(part, a[r].a[1], b[1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float s = i < 2 ? scale[r].x : scale[r].y, m = i < 2 ? shift[r].x : shift[r].y;
              sums.value[r][n][i] += s * part[i] + m * total[i];
            }
          }
        }
      }
    }
  }

  // scale * q + min in 16 bits: q is exact, the scale and the min are rounded, and so is the result.
  __device__ static void scale_fragments(Fragments& f, float2 scale, float2 shift) {
    const uint32_t scales[2] = {pack2<T>(scale.x, scale.x), pack2<T>(scale.y, scale.y)};
    const uint32_t shifts[2] = {pack2<T>(shift.x, shift.x), pack2<T>(shift.y, shift.y)};
#pragma unroll
    for (int i = 0; i < 8; ++i) f.a[i / 4][i % 4] = fma2<T>(f.a[i / 4][i % 4], scales[i % 2], shifts[i % 2]);
  }

  // ---- the pipeline ----

  __device__ void run() {
    unsigned char* shared = dynamic_shared();
    const auto stage = [&](int i) { return shared + i % kStages * p.plan.stage_bytes; };
    constexpr int kAhead = kStages - 1;
    const int count = worker_chunks<kGrouped>(p);

    Position here(p), ahead = here;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      if (i < count) {
        load_weight(stage(i), ahead);
        load_x(stage(i), ahead);
        ahead.advance(p);
      }
      cp_async_commit();
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<kAhead - 1>();
      __syncthreads();  // chunk i is there for everybody, and nobody reads chunk i - 1 any more
      if (i + kAhead < count) {
        load_weight(stage(i + kAhead), ahead);
        load_x(stage(i + kAhead), ahead);
        ahead.advance(p);
      }
      cp_async_commit();
      multiply(stage(i), here.chunk);
      if (here.chunk + 1 == p.plan.chunks || i + 1 == count) {
        Epilogue(p, here.unit, reinterpret_cast<float*>(shared + kStages * p.plan.stage_bytes)).store(sums);
        sums = {};
      }
      here.advance(p);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kResident)
    gemm_kernel(const __grid_constant__ typename Kernel::Params p) {
  grid_dependency_wait();
  grid_dependency_launch();
  Kernel(p).run();
}

// Counters of finished pieces, one per unit.
static __global__ void zero_counters_kernel(int* counters, int count) {
  grid_dependency_wait();
  grid_dependency_launch();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) counters[i] = 0;
}

template <template <class> class Weight>
void launch_gemm(const char* name, const typename Weight<__half>::Params& p, void* stream) {
  const GemmPlan& plan = p.plan;
  const bool grouped = p.expert_rows.start != nullptr;
  if (grouped) {
    list_expert_tiles(p, stream);
  } else if (plan.workspace_bytes > 0) {
    const LaunchConfig config{.grid = (plan.units + 255) / 256, .block = 256, .dependent = true};
    launch("zero_counters", zero_counters_kernel, config, stream, gemm_counters(p), plan.units);
  }
  const auto run = [&]<class T>(T) {
    const auto run_tile = [&]<int kTokens, bool kGrouped>() {
      launch(name, gemm_kernel<GemmKernel<Weight<T>, T, kTokens, kGrouped>>, plan.launch, stream, p);
    };
    if (grouped) {
      switch (plan.tile.tokens) {
        case 8: return run_tile.template operator()<8, true>();
        case 32: return run_tile.template operator()<32, true>();
        default: return run_tile.template operator()<128, true>();
      }
    }
    switch (plan.tile.tokens) {
      case 8: return run_tile.template operator()<8, false>();
      case 16: return run_tile.template operator()<16, false>();
      case 32: return run_tile.template operator()<32, false>();
      case 64: return run_tile.template operator()<64, false>();
      default: return run_tile.template operator()<128, false>();
    }
  };
  p.dtype == DType::kFloat16 ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace fastinfer::cuda
