// The GPU's matrix product: one pipeline and one main loop for every weight format (gemm/dense_weight_cuda.h,
// quant/*_dequantize_cuda.h). gemm/gemm_plan.h shows how the work is split over the multiprocessors, and a pipeline
// stage.
//
// A unit of work is 128 weight rows by a tile of tokens. The weight is mma's M side and the tokens are its N side,
// eight at a time, so that a single token wastes no tensor core time that memory would not have taken. Eight warps
// share the tile: four take two row tiles of 16 each, and the other factor of two divides the tokens, or with up to 32
// tokens the inputs of a chunk.
//
//                 up to 32 tokens                              more
//        tokens 0 .. kTokens - 1                 tokens 0 .. half | half .. kTokens - 1
//        +----------------------+                +----------------------+
//   row  |  warp 0, even blocks |           row  |  warp 0  |  warp 4   |      a block: 32 inputs
//     0  |  warp 4, odd blocks  |             0  |          |           |
//    32  |  warps 1 and 5       |            32  |  warp 1  |  warp 5   |
//    64  |  warps 2 and 6       |            64  |  warp 2  |  warp 6   |
//    96  |  warps 3 and 7       |            96  |  warp 3  |  warp 7   |
//        +----------------------+                +----------------------+
//
// Copies to shared memory run `stages - 1` chunks ahead, also from one unit to the next. For each block of 32 inputs a
// warp then does one of two things:
//
//   up to 64 tokens  The products of q and x are exact and are added up in fp32. Their sum is multiplied by the fp32
//                    scale, and min * sum(x) is added, so that only the result is rounded to 16 bits. sum(x) is an mma
//                    with a matrix of ones.
//   more             The fragments become scale * q + min in 16 bits: the scale and the weight are each rounded once.
//
// With a stack of experts (ExpertRows) each tile of tokens belongs to one expert. Its rows are gathered when they are
// copied to shared memory, and scattered when they are stored.
//
// With a norm and few tokens (unless results must not depend on their number), x * norm_weight is rounded to 16 bits on
// its way into the fragments. The squares of x are added up beside the products, and the sums are divided by the root
// mean square at the end.
#pragma once

#include "common/cuda/launch.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/expert_tiles_cuda.h"
#include "gemm/gemm_epilogue_cuda.h"

namespace fastinfer::cuda {

// The unit and chunk that a worker is at. With a stack of experts the token tiles come from a list.
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

  // A block of 32 inputs of this warp's row tiles.
  struct WeightBlock {
    Fragments a[kRowTiles];
    float2 scale[kRowTiles], min[kRowTiles];  // of rows g and g + 8; not for dense weights
    bool has_min = false;
  };

  using TokenFragments = uint32_t[2][2];  // mma's b for eight tokens: inputs 0 .. 15 of a block, then 16 .. 31

  // Adds a chunk's products to the sums.
  __device__ void multiply(unsigned char* stage, int chunk) {
    const int blocks = (static_cast<int>(p.k) + kBlockInputs - 1) / kBlockInputs - chunk * kBlocks;
#pragma unroll 1
    for (int block = warp_inputs; block < min(kBlocks, blocks); block += kWarpsInputs) {
      const WeightBlock w = load_weight_block(stage, chunk, block);
      float norm_weights[2][4];
      if (has_norm()) load_norm(stage + kNormWeights, block, norm_weights);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        TokenFragments b;
        load_tokens(stage + kX, block, n, b);
        if constexpr (kNorm) {
          if (has_norm()) normalise(b, norm_weights, sums.squares[n]);
        }
        if constexpr (kDense || !kExact) {
          add_products(w, b, n);
        } else {
          add_scaled_products(w, b, n);
        }
      }
    }
  }

  // The weights of a block, exact or, in wide tiles, scaled.
  __device__ WeightBlock load_weight_block(unsigned char* stage, int chunk, int block) const {
    WeightBlock w;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int row_tile = warp_rows * kRowTiles + r;
      w.a[r] = weight.template fragments<kChunk>(stage, row_tile, block);
      if constexpr (!kDense) {
        const int first = chunk * kBlocks, group = group_of(first + block) - group_of(first);
        w.has_min = p.weight.mins != nullptr;
        w.scale[r] = row_scales(stage + kScales, row_tile, group);
        w.min[r] = w.has_min ? row_scales(mins_of(stage + kScales), row_tile, group) : make_float2(0.0f, 0.0f);
        if constexpr (!kExact) scale_fragments(w.a[r], w.scale[r], w.min[r]);
      }
    }
    return w;
  }

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

  // scale * q + min in 16 bits: q is exact, the scale and the min are rounded, and so is the result.
  __device__ static void scale_fragments(Fragments& f, float2 scale, float2 min) {
    const uint32_t scales[2] = {pack2<T>(scale.x, scale.x), pack2<T>(scale.y, scale.y)};
    const uint32_t mins[2] = {pack2<T>(min.x, min.x), pack2<T>(min.y, min.y)};
#pragma unroll
    for (int i = 0; i < 8; ++i) f.a[i / 4][i % 4] = fma2<T>(f.a[i / 4][i % 4], scales[i % 2], mins[i % 2]);
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

  // Inputs of a block, for the warp's n-th eight tokens.
  __device__ void load_tokens(const unsigned char* x, int block, int n, TokenFragments& b) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int token = (warp_tokens * kTokenTiles + n) * 8 + g;
    const unsigned char* at = x + token * kRowBytes + (block * kBlockInputs + 4 * t) * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint2 inputs = *reinterpret_cast<const uint2*>(at + 32 * j);
      b[j][0] = inputs.x;
      b[j][1] = inputs.y;
    }
  }

  // Multiplies x by the norm weights, and adds up its squares.
  __device__ static void normalise(TokenFragments& b, const float (&w)[2][4], float& squares) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& pair = b[i / 2][i % 2];
      const float2 x = unpack2<T>(pair);
      squares += x.x * x.x + x.y * x.y;
      pair = pack2<T>(x.x * w[i / 2][i % 2 * 2], x.y * w[i / 2][i % 2 * 2 + 1]);
    }
  }

  __device__ void add_products(const WeightBlock& w, const TokenFragments& b, int n) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      mma<T>(sums.value[r][n], w.a[r].a[0], b[0]);
      mma<T>(sums.value[r][n], w.a[r].a[1], b[1]);
    }
  }

  // Adds scale * (exact products) + min * (sum of x).
  __device__ void add_scaled_products(const WeightBlock& w, const TokenFragments& b, int n) {
    float total[4] = {};  // the sum of x, the same in every row
    if (w.has_min) {
      constexpr uint32_t kOne = kOnes<T>;
      const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
      mma<T>(total, ones, b[0]);
      mma<T>(total, ones, b[1]);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float part[4] = {};
      mma<T>(part, w.a[r].a[0], b[0]);
      mma<T>(part, w.a[r].a[1], b[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = i < 2 ? w.scale[r].x : w.scale[r].y, min = i < 2 ? w.min[r].x : w.min[r].y;
        sums.value[r][n][i] += scale * part[i] + min * total[i];
      }
    }
  }

  // ---- the pipeline ----

  __device__ void run() {
    constexpr int kAhead = kStages - 1;
    unsigned char* shared = dynamic_shared();
    const auto stage = [&](int i) { return shared + i % kStages * p.plan.stage_bytes; };
    const int count = worker_chunks<kGrouped>(p);
    Position here(p), ahead = here;
    const auto start_copy = [&](int i) {
      if (i < count) {
        load_weight(stage(i), ahead);
        load_x(stage(i), ahead);
        ahead.advance(p);
      }
      cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) start_copy(i);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<kAhead - 1>();
      __syncthreads();  // chunk i is there for everybody, and nobody reads chunk i - 1 any more
      start_copy(i + kAhead);
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
