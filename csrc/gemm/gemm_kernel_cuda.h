// The GPU's matrix product: one pipeline and one main loop for every weight format (gemm/dense_weight_cuda.h,
// quant/*_dequantize_cuda.h). gemm/gemm_plan.h shows how the work is split over the multiprocessors, and a pipeline
// stage.
//
// A unit of work is 128 weight rows by a tile of tokens. The weight is mma's M side and the tokens are its N side,
// eight at a time, so that a single token wastes no tensor core time that memory would not have taken. Eight warps
// share the tile: four take two row tiles of 16 each, and the other factor of two divides the inputs of a chunk or,
// where the sums of all tokens would not fit the registers, the tokens (gemm_tile):
//
//        tokens 0 .. kTokens - 1                 tokens 0 .. half | half .. kTokens - 1
//        +----------------------+                +----------------------+
//   row  |  warp 0, first half  |           row  |  warp 0  |  warp 4   |
//     0  |  warp 4, second half |             0  |          |           |
//    32  |  warps 1 and 5       |            32  |  warp 1  |  warp 5   |
//    64  |  warps 2 and 6       |            64  |  warp 2  |  warp 6   |
//    96  |  warps 3 and 7       |            96  |  warp 3  |  warp 7   |
//        +----------------------+                +----------------------+
//
// Copies to shared memory (gemm_copy_cuda.h) run `stages - 1` chunks ahead, also from one unit to the next. A warp
// takes its part of a chunk in blocks of 32 inputs. With packed weights the products of q and x are exact and are added
// up in fp32, over a run of blocks that share a scale. Their sum is multiplied by the fp32 scale, and min * sum(x) is
// added, so that only the result is rounded to 16 bits. sum(x) is an mma with a matrix of ones.
//
// The common forms of scales have kernels of their own (GemmForm), whose runs are 64 or 128 inputs long. Where nothing
// is known about the scales, a run is a block.
//
// With a stack of experts (ExpertRows) each tile of tokens belongs to one expert. Its rows are gathered when they are
// copied to shared memory, and scattered when they are stored.
#pragma once

#include <type_traits>

#include "common/cuda/launch.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/gemm_copy_cuda.h"
#include "gemm/gemm_epilogue_cuda.h"
#include "gemm/gemm_mins_cuda.h"
#include "gemm/gemm_position_cuda.h"
#include "gemm/gemm_wide_kernel_cuda.h"

namespace fastinfer::cuda {

// Waits until at most `pending` of this thread's groups of copies are under way.
__device__ inline void wait_for_copies(int pending) {
  static_assert(kMostStages == 6);
  if (pending >= 4) return cp_async_wait<4>();  // the most common case
  switch (pending) {
    case 0: return cp_async_wait<0>();
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    default: return cp_async_wait<3>();
  }
}

template <class Weight, class T, int kTokens, bool kGrouped, GemmForm kForm>
struct GemmKernel {
  using Params = typename Weight::Params;
  static constexpr GemmTile kTile = gemm_tile(Weight::kFormat, kTokens);
  static constexpr bool kWaitsFirst = kGrouped;  // for the rows of the experts, which are another kernel's result
  static constexpr bool kDense = Weight::kFormat == WeightFormat::kDense;
  static constexpr int kThreads = kTile.threads(), kTableBytes = gemm_table_bytes(Weight::kFormat);
  static constexpr int kResident = gemm_resident(Weight::kFormat, kTokens);
  // Whether a lane's place in the weight stays in a register. Two blocks have none to spare, and compute it again.
  static constexpr bool kHoldsLane = kResident == 1;
  static constexpr int kChunk = kTile.chunk, kBlocks = kTile.blocks();
  static constexpr int kWarpsRows = kTile.warps_rows, kWarpsTokens = kTile.warps_tokens;
  static constexpr int kWarpsInputs = kTile.warps_inputs;
  static constexpr int kRowTiles = kGemmRowTiles / kWarpsRows;    // of a warp
  static constexpr int kTokenTiles = kTokens / 8 / kWarpsTokens;  // of a warp
  static constexpr int kWarpBlocks = kBlocks / kWarpsInputs;      // of a warp, in a chunk
  // Blocks of a run, which share a scale.
  static constexpr int kRun =
      kForm == GemmForm::kAny ? 1 : std::min(kWarpBlocks, common_group(Weight::kFormat) / kBlockInputs);
  static constexpr bool kOneGroup = !kDense && is_chunk_in_group(Weight::kFormat, kForm, kChunk);
  // With 64 tokens the minimums are products of their own (gemm_mins_cuda.h).
  static constexpr bool kMinsApart = kForm == GemmForm::kMins && kTokens == 64;
  static constexpr int kRowBytes = shared_row_bytes(kChunk);
  static constexpr GemmStage kStage = gemm_stage(Weight::kFormat, kTokens, kChunk);
  static_assert(kWarpBlocks % kRun == 0);
  using Copy = GemmCopy<Weight, T, kTokens, kGrouped, kForm>;
  using Epilogue = GemmEpilogue<T, kTokens, kWarpsRows, kWarpsTokens, kWarpsInputs, kGrouped>;
  using Mins = std::conditional_t<kMinsApart, GemmMins<T, 64, 128>, NoMins>;
  static_assert(Mins::kBytes <= gemm_sums_bytes(kTile));

  const Params& p;
  const Weight weight;
  // Of this warp, in a stage.
  const int first_row_tile, first_block;
  // Of the warp's first block of the weight (with kHoldsLane of this lane's part of it), of this lane's part of x, and
  // of its scales (an index).
  const unsigned weight_place, x_place, scale_place;
  const Mins mins;
  typename Epilogue::Sums sums;

  __device__ explicit GemmKernel(const Params& params)
      : p(params),
        weight(params),
        first_row_tile(static_cast<int>(threadIdx.x) / kWarpSize % kWarpsRows * kRowTiles),
        first_block(static_cast<int>(threadIdx.x) / kWarpSize / kWarpsRows / kWarpsTokens * kWarpBlocks),
        weight_place(opaque(Weight::template place<kChunk>(first_row_tile, first_block) +
                            (kHoldsLane ? Weight::template lane_place<kChunk>() : 0))),
        x_place(opaque(lane_x())),
        scale_place(opaque(lane_scales())),
        mins(kTableBytes + p.plan.stages * p.plan.stage_bytes) {}

  // ---- a stage's products ----

  using TokenFragments = uint32_t[2][2];  // mma's b for eight tokens: inputs 0 .. 15 of a block, then 16 .. 31

  // The place of this lane's first inputs in a stage.
  __device__ unsigned lane_x() const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int warp_tokens = static_cast<int>(threadIdx.x) / kWarpSize / kWarpsRows % kWarpsTokens;
    return kStage.x + (warp_tokens * kTokenTiles * 8 + g) * kRowBytes + first_block * kBlockInputs * 2 + t * 8;
  }

  // The place of this lane's first scale among those of a stage.
  __device__ unsigned lane_scales() const {
    if constexpr (kDense) {
      return 0;
    } else {
      const int groups = kOneGroup ? 1 : p.plan.chunk_groups;
      return (first_row_tile * groups * kTileRows + threadIdx.x % kWarpSize / 4);
    }
  }

  // Adds a chunk's products to the sums; `place` is its number in the unit.
  __device__ void multiply(const unsigned char* stage, int chunk, int place) {
    const int blocks = (static_cast<int>(p.k) + kBlockInputs - 1) / kBlockInputs - chunk * kBlocks - first_block;
#pragma unroll(kDense || kForm != GemmForm::kAny ? kWarpBlocks : 1)
    for (int i = 0; i < kWarpBlocks; i += kRun) {
      if (!kOneGroup && i >= blocks) break;
      if constexpr (kDense) {
        multiply_dense(stage, i);
      } else {
        Copy::has_mins(p) && !kMinsApart ? multiply_run<true>(stage, chunk, place, i)
                                         : multiply_run<false>(stage, chunk, place, i);
      }
    }
  }

  __device__ void multiply_dense(const unsigned char* stage, int block) {
    Fragments a[kRowTiles];
    load_fragments(stage, block, a);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) add_products(a, stage, block, n);
  }

  // Adds scale * (exact products) + min * (sum of x) of a run.
  template <bool kMins>
  __device__ void multiply_run(const unsigned char* stage, int chunk, int place, int block) {
    float products[kRowTiles][kTokenTiles][4] = {};
    float x_sums[kTokenTiles][4] = {};  // the same in every row
    typename Mins::Sums shared_x_sums;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      Fragments a[kRowTiles];
      load_fragments(stage, block + i, a);
      if constexpr (kMinsApart) {
        constexpr int kParts = Mins::kParts / kRun;
#pragma unroll
        for (int part = 0; part < kParts; ++part) mins.add_up(shared_x_sums, stage, i * kParts + part);
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        TokenFragments b;
        load_tokens(stage, block + i, n, b);
        if constexpr (kMins) {
          constexpr uint32_t kOne = kOnes<T>;
          const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
          mma<T>(x_sums[n], ones, b[0]);
          mma<T>(x_sums[n], ones, b[1]);
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<T>(products[r][n], a[r].a[0], b[0]);
          mma<T>(products[r][n], a[r].a[1], b[1]);
        }
      }
    }
    if constexpr (kMinsApart) mins.keep(shared_x_sums, stage, place);
    const Scales scales(*this, stage, chunk, block);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums.value[r][n][i];
          sum = fmaf(i < 2 ? scales.scale[r].x : scales.scale[r].y, products[r][n][i], sum);
          if (kMins) sum = fmaf(i < 2 ? scales.min[r].x : scales.min[r].y, x_sums[n][i], sum);
        }
      }
    }
  }

  // The exact weights of one of this warp's blocks, for each row tile.
  __device__ void load_fragments(const unsigned char* stage, int block, Fragments (&a)[kRowTiles]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const unsigned lane_place = kHoldsLane ? 0 : Weight::template lane_place<kChunk>();
      a[r] = weight.template fragments<kChunk>(stage + weight_place + lane_place, r, block);
    }
  }

  // Of rows g and g + 8 of each row tile.
  struct Scales {
    float2 scale[kRowTiles], min[kRowTiles];

    __device__ Scales(const GemmKernel& kernel, const unsigned char* stage, int chunk, int block) {
      const Params& p = kernel.p;
      int group = 0, groups = 1;  // in the stage
      if constexpr (!kOneGroup) {
        const int first = chunk * kBlocks, own = first + kernel.first_block + block;
        group = Copy::group_of(p, own) - Copy::group_of(p, first);
        groups = p.plan.chunk_groups;
      }
      const unsigned place = kernel.scale_place + group * kTileRows;
      const unsigned char* const scales = stage + kStage.scales;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const unsigned at = place + r * groups * kTileRows;
        scale[r] = row_scales(p, scales, at);
        min[r] = make_float2(0.0f, 0.0f);
        if (Copy::has_mins(p) && !kMinsApart) min[r] = row_scales(p, scales + Copy::mins_offset(p), at);
      }
    }
  };

  // The scales or mins of a row and of the eighth after it.
  __device__ static float2 row_scales(const Params& p, const unsigned char* scales, unsigned at) {
    if (Copy::scale_size(p) == 2) {
      const auto* s = reinterpret_cast<const __half*>(scales) + at;
      return {to_float(s[0]), to_float(s[8])};
    }
    const auto* s = reinterpret_cast<const float*>(scales) + at;
    return {s[0], s[8]};
  }

  // Inputs of one of this warp's blocks, for its n-th eight tokens.
  __device__ void load_tokens(const unsigned char* stage, int block, int n, TokenFragments& b) const {
    const unsigned char* at = stage + x_place + n * 8 * kRowBytes + block * kBlockInputs * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint2 inputs = *reinterpret_cast<const uint2*>(at + 32 * j);
      b[j][0] = inputs.x;
      b[j][1] = inputs.y;
    }
  }

  __device__ void add_products(const Fragments (&a)[kRowTiles], const unsigned char* stage, int block, int n) {
    TokenFragments b;
    load_tokens(stage, block, n, b);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      mma<T>(sums.value[r][n], a[r].a[0], b[0]);
      mma<T>(sums.value[r][n], a[r].a[1], b[1]);
    }
  }

  // ---- the pipeline ----

  __device__ void run() {
    unsigned char* const shared = dynamic_shared() + kTableBytes;
    const int end = p.plan.stages * p.plan.stage_bytes, ahead = p.plan.stages - 1;
    const auto advance = [&](int& stage) {
      stage += p.plan.stage_bytes;
      if (stage == end) stage = 0;
    };
    const TokenTiles<kGrouped> tiles(p);
    int from = 0, to = 0, uncopied = worker_chunks<kGrouped>(p, tiles);  // places of stages, and chunks
    Copy copy(p, tiles);
    // Weights first: if they are constant, the kernel before has not ended yet (gemm_kernel).
    Copy weights = copy;
#pragma unroll 1
    for (int i = 0; i < min(ahead, uncopied); ++i, weights.advance())
      weights.load_weight(shared + i * p.plan.stage_bytes);
    grid_dependency_wait();
    grid_dependency_launch();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (uncopied > 0) {
        copy.load_x(shared + to);
        copy.advance();
      }
      --uncopied;
      cp_async_commit();
      advance(to);
    }
    const auto start_copy = [&] {
      if (uncopied > 0) {
        copy.load_weight(shared + to);
        copy.load_x(shared + to);
        copy.advance();
      }
      --uncopied;
      cp_async_commit();
      advance(to);
    };
    GemmPosition<kGrouped> here(p, tiles);
#pragma unroll 1
    while (uncopied + ahead > 0) {
      const int chunks = min(uncopied + ahead, p.plan.chunks - here.chunk);  // of this unit
#pragma unroll 1
      for (int chunk = here.chunk; chunk < here.chunk + chunks; ++chunk) {
        const int i = chunk - here.chunk;
        wait_for_copies(ahead - 1);
        __syncthreads();  // this chunk is there for everybody, and nobody reads the one before any more
        if constexpr (kMinsApart) {
          if (mins.is_batch(i)) mins.template add<true>(sums.value, first_row_tile, first_block / kWarpBlocks, i);
        }
        start_copy();
        multiply(shared + from, chunk, i);
        advance(from);
      }
      if constexpr (kMinsApart) {
        __syncthreads();  // the last batch is there for everybody
        mins.template add<false>(sums.value, first_row_tile, first_block / kWarpBlocks, chunks);
        __syncthreads();  // and has been read before the sums take its place
      }
      Epilogue(p, tiles, here.unit, reinterpret_cast<float*>(shared + end)).store(sums);
      sums = {};
      here.next_unit(p, tiles);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kResident)
    gemm_kernel(const __grid_constant__ typename Kernel::Params p) {
  if (Kernel::kWaitsFirst || !p.constant_weights) grid_dependency_wait();
  Kernel(p).run();
}

template <template <class> class Weight>
GemmForm gemm_form(const typename Weight<__half>::Params& p) {
  if constexpr (Weight<__half>::kFormat != WeightFormat::kDense) {
    const bool common = p.weight.scale_dtype == DType::kFloat16 &&
                        p.weight.group_blocks * kBlockInputs % common_group(Weight<__half>::kFormat) == 0;
    if (common && p.weight.mins == nullptr) return GemmForm::kCommon;
    if (common && Weight<__half>::kFormat == WeightFormat::kInt4) return GemmForm::kMins;
  }
  return GemmForm::kAny;
}

template <template <class> class Weight>
void launch_gemm(const char* name, const typename Weight<__half>::Params& p, void* stream) {
  const GemmPlan& plan = p.plan;
  const bool grouped = p.expert_rows.start != nullptr;
  const GemmForm form = gemm_form<Weight>(p);
  const auto run = [&]<class T>(T) {
    const auto run_kernel = [&]<class Kernel>() { launch(name, gemm_kernel<Kernel>, plan.launch, stream, p); };
    const auto run_tile = [&]<int kTokens, bool kGrouped>() {
      if constexpr (kTokens > kMostExactTokens) {
        run_kernel.template operator()<GemmWideKernel<Weight<T>, T, kTokens, kGrouped>>();
      } else {
        const auto run_form = [&]<GemmForm kForm>() {
          run_kernel.template operator()<GemmKernel<Weight<T>, T, kTokens, kGrouped, kForm>>();
        };
        constexpr WeightFormat kFormat = Weight<T>::kFormat;
        if constexpr (kFormat != WeightFormat::kDense) {
          if (form == GemmForm::kCommon) return run_form.template operator()<GemmForm::kCommon>();
        }
        if constexpr (kFormat == WeightFormat::kInt4) {
          if (form == GemmForm::kMins) return run_form.template operator()<GemmForm::kMins>();
        }
        run_form.template operator()<GemmForm::kAny>();
      }
    };
    if (grouped) {
      switch (plan.tile.tokens) {
        case 8: return run_tile.template operator()<8, true>();
        case 32: return run_tile.template operator()<32, true>();
        case 128: return run_tile.template operator()<128, true>();
        default: return run_tile.template operator()<256, true>();
      }
    }
    switch (plan.tile.tokens) {
      case 8: return run_tile.template operator()<8, false>();
      case 16: return run_tile.template operator()<16, false>();
      case 32: return run_tile.template operator()<32, false>();
      case 64: return run_tile.template operator()<64, false>();
      case 128: return run_tile.template operator()<128, false>();
      default: return run_tile.template operator()<256, false>();
    }
  };
  p.dtype == DType::kFloat16 ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace fastinfer::cuda
