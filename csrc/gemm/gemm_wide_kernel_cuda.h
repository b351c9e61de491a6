// The GPU's matrix product for more than 64 tokens: a pipeline and a main loop that keep the tensor cores busy, for
// every weight format. gemm/gemm_plan.h shows how the work is split over the multiprocessors.
//
// A unit of work is 128 weight rows by 128 or 256 tokens, and a chunk of it 64 inputs. Each of eight warps multiplies
// 64 rows by 64 tokens, from which mma (the weight is its M side) takes four tiles of 16 rows and eight of 8 tokens:
//
//                  128 tokens                           256 tokens
//          0 .. 63        64 .. 127        0 .. 63   64 .. 127   128 .. 191  192 .. 255
//        +--------------+--------------+  +---------+-----------+-----------+-----------+
//   row  | warp 0 or 2  | warp 4 or 6  |  | warp 0  | warp 2    | warp 4    | warp 6    |
//    64  | warp 1 or 3  | warp 5 or 7  |  | warp 1  | warp 3    | warp 5    | warp 7    |
//        +--------------+--------------+  +---------+-----------+-----------+-----------+
//
// With 128 tokens the first of two warps takes inputs 0 .. 31 of a chunk, the second 32 .. 63. A warp whose tokens do
// not exist does not multiply; up to half the tokens are the work of warps 0 to 3, one for each tensor core.
//
// Tokens and dense weights have rows of 128 bytes in shared memory, swizzled. Dense weights come from there as they
// are, by ldmatrix. Packed ones become scale * q + min in 16 bits in registers: q is exact, the scale and the min are
// rounded to 16 bits, and so is the result. Copies to shared memory run `stages - 1` chunks ahead, also from one unit
// to the next. The stage of a unit's last chunk then serves for the sums on their way out.
#pragma once

#include "common/cuda/ptx.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/gemm_epilogue_cuda.h"
#include "gemm/gemm_position_cuda.h"

namespace fastinfer::cuda {

template <class Weight, class T, int kTokens, bool kGrouped>
struct GemmWideKernel {
  using Params = typename Weight::Params;
  using Position = GemmPosition<kGrouped>;
  static constexpr bool kWaitsFirst = true;
  static constexpr bool kDense = Weight::kFormat == WeightFormat::kDense;
  static constexpr GemmTile kTile = wide_tile(kTokens);
  static constexpr int kThreads = kTile.threads(), kResident = gemm_resident(Weight::kFormat, kTokens);
  static constexpr int kTableBytes = gemm_table_bytes(Weight::kFormat);
  static constexpr int kChunk = kTile.chunk, kBlocks = kTile.blocks();
  static constexpr int kRowBytes = kChunk * 2, kPieces = kRowBytes / 16;  // pieces: 16 bytes, which a thread copies
  static constexpr int kRowStep = kThreads / kPieces;                     // rows that a copy by all threads takes
  static constexpr int kWarpsRows = kTile.warps_rows, kWarpsTokens = kTile.warps_tokens;
  static constexpr int kWarpsInputs = kTile.warps_inputs, kWarpBlocks = kBlocks / kWarpsInputs;
  static constexpr int kRowTiles = kGemmRowTiles / kWarpsRows, kTokenTiles = kTokens / 8 / kWarpsTokens;  // of a warp
  static constexpr GemmStage kStage = gemm_stage(Weight::kFormat, kTokens, kChunk);
  using Epilogue = GemmEpilogue<T, kTokens, kWarpsRows, kWarpsTokens, kWarpsInputs, kGrouped>;
  static_assert(kRowBytes == 128 && kThreads / kWarpSize == kGemmRowTiles);
  static_assert(gemm_sums_bytes(kTile) <= kStage.scales);  // of a stage, in which the sums leave

  const Params& p;
  const Weight weight;
  const TokenTiles<kGrouped> tiles;
  // In a stage, of this lane's part of the warp's weight, tokens and scales (an index).
  const unsigned weight_place, x_place, scale_place;
  typename Epilogue::Sums sums;

  __device__ explicit GemmWideKernel(const Params& params)
      : p(params),
        weight(params),
        tiles(params),
        weight_place(opaque(lane_weight())),
        x_place(opaque(lane_tokens())),
        scale_place(opaque(warp_rows() * kRowTiles * params.plan.chunk_groups * kTileRows + lane() / 4)),
        ahead(params, tiles) {
    begin_unit();
  }

  // ---- copies into a stage ----

  // Where this thread's copies of the next chunk come from.
  Position ahead;
  const unsigned char* weight_from;
  const T* x_from;
  int weight_rows, x_rows;  // rows (packed: row tiles) that exist, from this thread's first on
  uint32_t x_row[kGrouped ? kTokens / kRowStep : 1];  // in pieces of 16 bytes from x_from on
  int64_t scales_from;

  // A packed chunk: each row tile's blocks lie together.
  static constexpr int kBlockBytes = kTileRows * kBlockInputs * packed_bits(Weight::kFormat) / 8;
  static constexpr int kTilePieces = kBlocks * kBlockBytes / 16, kTileStep = kThreads / kTilePieces;

  __device__ int row_tiles() const {
    return (static_cast<int>(p.n) + kTileRows - 1) / kTileRows;
  }
  __device__ int scale_pieces() const
    requires(!kDense)
  {
    return p.weight.scale_dtype == DType::kFloat16 ? 2 : 4;  // 16 scales are so many pieces
  }

  __device__ void begin_unit() {
    const int thread = opaque(threadIdx.x), row = thread / kPieces, input = ahead.chunk * kChunk + thread % kPieces * 8;
    const int expert = ahead.expert_tile.expert, first_token = ahead.first_token(p) + row;
    x_rows = ahead.end_token(p) - first_token;
    x_from = static_cast<const T*>(p.x) + input;
    if constexpr (kGrouped) {
#pragma unroll
      for (int i = 0; i < kTokens / kRowStep; ++i) {
        const int64_t x_row_index = i * kRowStep < x_rows ? p.expert_rows.x_row(first_token + i * kRowStep) : 0;
        x_row[i] = static_cast<uint32_t>(x_row_index * (p.x_stride / 8));
      }
    } else {
      x_from += first_token * p.x_stride;
    }
    if constexpr (kDense) {
      const int first_row = ahead.row_unit * kGemmRows + row;
      weight_rows = static_cast<int>(p.n) - first_row;
      weight_from = static_cast<const unsigned char*>(p.weight) + ((expert * p.n + first_row) * p.k + input) * 2;
    } else {
      const int64_t first_tile = int64_t{expert} * row_tiles();
      const int tile = ahead.row_unit * kGemmRowTiles + thread / kTilePieces,
                blocks = static_cast<int>(p.k) / kBlockInputs;
      weight_rows = row_tiles() - tile;
      weight_from = static_cast<const unsigned char*>(p.weight.q) +
                    ((first_tile + tile) * blocks + ahead.chunk * kBlocks) * kBlockBytes + thread % kTilePieces * 16;
      scales_from =
          (first_tile + ahead.row_unit * kGemmRowTiles + thread / kWarpSize) * p.weight.groups * scale_pieces();
    }
  }

  // What is not there becomes zeros; its address is not read and may be anything.
  __device__ void copy_chunk(unsigned char* stage) {
    const unsigned thread = opaque(threadIdx.x), row = thread / kPieces, piece = thread % kPieces;
    const unsigned first_input = ahead.chunk * kChunk, inputs = static_cast<unsigned>(p.k);
    const bool inside = first_input + piece * 8 < inputs;
    const unsigned place = row * kRowBytes + (piece * 16 ^ pair_swizzle(row));
    if constexpr (kDense) {
      const int rows = inside ? weight_rows : 0;
      const unsigned char* from = weight_from;
#pragma unroll
      for (int i = 0; i < kGemmRows; i += kRowStep, from += kRowStep * 2 * p.k) {
        cp_async(stage + place + i * kRowBytes, from, i < rows);
      }
    } else {
      const unsigned block = thread % kTilePieces / (kBlockBytes / 16);
      const int tiles = first_input + block * kBlockInputs < inputs ? weight_rows : 0;
#pragma unroll
      for (int i = 0; i < kGemmRowTiles; i += kTileStep) {
        cp_async(stage + thread * 16 + i * kBlocks * kBlockBytes,
                 weight_from + static_cast<int64_t>(i) * (inputs / kBlockInputs) * kBlockBytes, i < tiles);
      }
      copy_scales(stage + kStage.scales);
    }
    const int rows = inside ? x_rows : 0;
    unsigned char* const to = stage + kStage.x + place;
    const T* from = x_from;
#pragma unroll
    for (int i = 0; i < kTokens; i += kRowStep, from += kRowStep * p.x_stride) {
      cp_async(to + i * kRowBytes, kGrouped ? x_from + uint64_t{x_row[i / kRowStep]} * 8 : from, i < rows);
    }
    if (ahead.advance(p, tiles)) {
      begin_unit();
    } else {
      x_from += kChunk;
      weight_from += kDense ? kRowBytes : kBlocks * kBlockBytes;
    }
  }

  // The scales and mins of the chunk's groups: a run of memory for each row tile, which a warp copies.
  __device__ void copy_scales(unsigned char* to) const
    requires(!kDense)
  {
    const int pieces = p.plan.chunk_groups * scale_pieces(), tile = threadIdx.x / kWarpSize;
    if (lane() >= pieces) return;
    const int piece = p.weight.group_of(ahead.chunk * kBlocks) * scale_pieces() + lane();
    const bool valid = ahead.row_unit * kGemmRowTiles + tile < row_tiles() && piece < p.weight.groups * scale_pieces();
    const int64_t offset = (scales_from + piece) * 16;
    to += (tile * pieces + lane()) * 16;
    cp_async(to, static_cast<const unsigned char*>(p.weight.scales) + offset, valid);
    if (p.weight.mins != nullptr) {
      cp_async(to + p.plan.chunk_groups * kScaleBytes, static_cast<const unsigned char*>(p.weight.mins) + offset,
               valid);
    }
  }

  // ---- a stage's products ----

  __device__ static int lane() {
    return threadIdx.x % kWarpSize;
  }
  __device__ static int warp_rows() {
    return threadIdx.x / kWarpSize % kWarpsRows;
  }
  __device__ static int warp_tokens() {
    return threadIdx.x / kWarpSize / kWarpsRows / kWarpsInputs;
  }
  __device__ static int warp_inputs() {
    return threadIdx.x / kWarpSize / kWarpsRows % kWarpsInputs;
  }

  using TokenFragments = uint32_t[2][2];  // mma's b for eight tokens: inputs 0 .. 15 of a block, then 16 .. 31

  // The place of the lane's inputs of the warp's first block and tokens; others are an exclusive or or a sum away.
  __device__ static unsigned lane_tokens() {
    static_assert(kStage.x % 128 == 0);
    const int row = kDense ? lane() % 8 : lane() / 4, input = kDense ? lane() / 8 * 16 : lane() % 4 * 8;
    const int block = warp_inputs() * kWarpBlocks * kBlockInputs * 2;
    return kStage.x + (warp_tokens() * kTokenTiles * 8 + row) * kRowBytes + (input ^ pair_swizzle(row) ^ block);
  }

  // Inputs of one of the warp's blocks, for its n-th eight tokens, in the order of the weight's.
  __device__ void load_tokens(const unsigned char* stage, int block, int n, TokenFragments& b) const {
    if constexpr (kDense) {
      uint32_t r[4];  // four matrices of eight tokens by eight inputs
      ldmatrix(r, stage + (x_place ^ block * (kBlockInputs * 2)) + n * 8 * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned place = (x_place ^ (block * 2 + j) * 32) + n * 8 * kRowBytes;
        const uint2 inputs = *reinterpret_cast<const uint2*>(stage + place);
        b[j][0] = inputs.x;
        b[j][1] = inputs.y;
      }
    }
  }

  // In 16 bits, twice, as a packed multiplication takes them: of rows g and g + 8 of the warp's row tiles.
  struct Scales {
    uint32_t scale[kRowTiles][2], min[kRowTiles][2];
  };

  __device__ Scales load_scales(const unsigned char* stage, int chunk, int block) const {
    Scales s{};
    if constexpr (!kDense) {
      int group = 0;  // in the stage
      if (p.plan.chunk_groups > 1) {
        const int first = chunk * kBlocks, own = first + warp_inputs() * kWarpBlocks + block;
        group = p.weight.group_of(own) - p.weight.group_of(first);
      }
      row_scales(stage + kStage.scales, group, s.scale);
      if (p.weight.mins != nullptr) {
        row_scales(stage + kStage.scales + p.plan.chunk_groups * kScaleBytes, group, s.min);
      }
    }
    return s;
  }

  __device__ void row_scales(const unsigned char* scales, int group, uint32_t (&to)[kRowTiles][2]) const
    requires(!kDense)
  {
    const int stride = p.plan.chunk_groups * kTileRows;
    const unsigned first = scale_place + group * kTileRows;
    const auto load = [&]<class S>(const S* from) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float scale = to_float(from[first + r * stride + i * 8]);
          to[r][i] = pack2<T>(scale, scale);
        }
      }
    };
    if (p.weight.scale_dtype == DType::kFloat16) {
      load(reinterpret_cast<const __half*>(scales));
    } else {
      load(reinterpret_cast<const float*>(scales));
    }
  }

  // The place of the lane's part of the warp's first rows and block of the weight.
  __device__ static unsigned lane_weight() {
    const int first_tile = warp_rows() * kRowTiles, first_block = warp_inputs() * kWarpBlocks;
    if constexpr (kDense) {
      const int row = lane() % kTileRows, input = lane() / kTileRows * 16;
      return (first_tile * kTileRows + row) * kRowBytes +
             (input ^ pair_swizzle(row) ^ first_block * (kBlockInputs * 2));
    } else {
      return Weight::template place<kChunk>(first_tile, first_block) + Weight::template lane_place<kChunk>();
    }
  }

  // 16 of the warp's rows by one of its blocks of the weight, in 16 bits.
  __device__ Fragments load_weight(const unsigned char* stage, int r, int block, const Scales& s) const {
    Fragments f;
    if constexpr (kDense) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ldmatrix(f.a[j], stage + (weight_place ^ (block * 2 + j) * 32) + r * kTileRows * kRowBytes);
      }
    } else {
      f = weight.template fragments<kChunk>(stage + weight_place, r, block);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        f.a[i / 4][i % 4] = fma2<T>(f.a[i / 4][i % 4], s.scale[r][i % 2], s.min[r][i % 2]);
      }
    }
    return f;
  }

  // Adds a chunk's products to the sums. Fragments are loaded one row tile ahead, those of x when their registers have
  // been read for the last time.
  __device__ void multiply(const unsigned char* stage, int chunk) {
    constexpr int kSteps = kWarpBlocks * kRowTiles;
    TokenFragments b[kTokenTiles];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) load_tokens(stage, 0, n, b[n]);
    Scales scales = load_scales(stage, chunk, 0);
    Fragments next = load_weight(stage, 0, 0, scales);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int r = step % kRowTiles;
      const int block = (step + 1) / kRowTiles;  // the next step's
      const Fragments a = next;
      if (step + 1 < kSteps) {
        if (r + 1 == kRowTiles) scales = load_scales(stage, chunk, block);
        next = load_weight(stage, (step + 1) % kRowTiles, block, scales);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          mma<T>(sums.value[r][n], a.a[j], b[n][j]);
          if (j == 1 && r + 1 == kRowTiles && step + 1 < kSteps) load_tokens(stage, block, n, b[n]);
        }
      }
    }
  }

  // ---- the pipeline ----

  __device__ static void wait(int stages) {
    switch (stages) {
      case 2: return cp_async_wait<0>();
      case 3: return cp_async_wait<1>();
      default: return cp_async_wait<2>();
    }
  }

  __device__ void run() {
    grid_dependency_launch();
    unsigned char* const shared = dynamic_shared() + kTableBytes;
    const int stages = p.plan.stages, stage_bytes = p.plan.stage_bytes;
    const auto after = [&](int offset) {
      const int next = offset + stage_bytes;
      return next == stages * stage_bytes ? 0 : next;
    };
    int count = worker_chunks<kGrouped>(p, tiles), ahead_count = count;  // chunks still to be multiplied, to be copied
    int read = 0, written = 0;                                           // offsets of stages
    const auto start_copy = [&] {
      if (--ahead_count >= 0) copy_chunk(shared + written);
      cp_async_commit();
      written = after(written);
    };
    Position here = ahead;
#pragma unroll 1
    for (int i = 1; i < stages; ++i) start_copy();
    while (count > 0) {
      const int chunks = min(p.plan.chunks - here.chunk, count);
      const bool warp_exists = here.first_token(p) + warp_tokens() * kTokenTiles * 8 < here.end_token(p);
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) {
        if (i > 0) read = after(read);
        wait(stages);
        __syncthreads();  // the chunk is there for everybody, and nobody reads the one before it any more
        start_copy();
        if (warp_exists) multiply(shared + read, here.chunk + i);
      }
      __syncthreads();
      Epilogue(p, tiles, here.unit, reinterpret_cast<float*>(shared + read)).store(sums);
      sums = {};
      read = after(read);
      count -= chunks;
      here.next_unit(p, tiles);
    }
  }
};

}  // namespace fastinfer::cuda
