// The copies to shared memory of the GPU's matrix products. A worker's copies run ahead of its products; what the
// chunks of a unit share, addresses above all, is computed once per unit.
#pragma once

#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/gemm_position_cuda.h"

namespace fastinfer::cuda {

// What a kernel knows about the scales of its weight when it is compiled.
enum class GemmForm {
  kAny,     // nothing: it asks for the type of the scales, the size of the groups, and whether there are mins
  kCommon,  // fp16 scales of whole multiples of common_group inputs, without mins
  kMins,    // the same with mins
};

// Look-up tables come with groups of 64; int8's warps take 64 inputs of a chunk in any case.
constexpr int common_group(WeightFormat format) {
  return format == WeightFormat::kInt4 ? 128 : 64;
}

// Whether what is known about the scales makes a chunk a part of one group. Then the inputs are whole chunks as well.
constexpr bool is_chunk_in_group(WeightFormat format, GemmForm form, int chunk) {
  return form != GemmForm::kAny && common_group(format) % chunk == 0;
}

// The 16-byte pieces of x that a thread copies in each chunk: one place in a row, in every kStep-th row.
template <int kTokens, int kChunk, int kThreads>
struct GemmPieces {
  static constexpr int kPieces = kChunk / 8, kStep = kThreads / kPieces;
  static constexpr int kRows = (kTokens + kStep - 1) / kStep;
  static constexpr int kRowBytes = shared_row_bytes(kChunk);
  static_assert(kStep % 4 == 0);
  static_assert(kTokens % kStep == 0 || kTokens < kStep);

  const int row, input;
  const unsigned first;  // byte in a stage's x

  __device__ GemmPieces()
      : row(static_cast<int>(threadIdx.x) / kPieces),
        input(static_cast<int>(threadIdx.x) % kPieces * 8),
        first(opaque(row * kRowBytes + input * 2)) {}

  __device__ unsigned char* place(unsigned char* x, int i) const {
    return x + first + i * kStep * kRowBytes;
  }
  // Of `tokens`, the rows of this thread are those before place(limit).
  __device__ int limit(int tokens) const {
    return (min(tokens, kTokens) - row + kStep - 1) / kStep;
  }
};

template <class Weight, class T, int kTokens, bool kGrouped, GemmForm kForm>
class GemmCopy {
  using Params = typename Weight::Params;
  static constexpr bool kDense = Weight::kFormat == WeightFormat::kDense;
  static constexpr GemmTile kTile = gemm_tile(Weight::kFormat, kTokens);
  static constexpr int kChunk = kTile.chunk, kBlocks = kTile.blocks(), kThreads = kTile.threads();
  static constexpr GemmStage kStage = gemm_stage(Weight::kFormat, kTokens, kChunk);
  static constexpr bool kOneGroup = !kDense && is_chunk_in_group(Weight::kFormat, kForm, kChunk);
  // Rows of x and of the weight past the last are copies of others: a copy needs no condition, a comparison less.
  static constexpr bool kClamped = kOneGroup && !kGrouped;
  using Pieces = GemmPieces<kTokens, kChunk, kThreads>;

 public:
  const Pieces pieces;

  __device__ GemmCopy(const Params& params, const TokenTiles<kGrouped>& tiles)
      : p(params), tiles(tiles), at(params, tiles) {
    start_unit();
  }

  // The weight of a chunk, with its scales. What lies past the weight's end is not used, and copied at most with
  // kClamped.
  __device__ void load_weight(unsigned char* stage) const {
    if constexpr (kDense) {
      weight.copy(stage);
    } else {
      weight.copy(stage + threadIdx.x * 16);
      load_scales(stage + kStage.scales + threadIdx.x * 16);
    }
  }

  // The x of a chunk. Rows past the last are not copied, or are copies of the last: they do not matter to the other
  // tokens.
  __device__ void load_x(unsigned char* stage) const {
    const unsigned input = at.chunk * kChunk + pieces.input;
    const bool inside = kOneGroup || input < static_cast<unsigned>(p.k);
    const T* x = static_cast<const T*>(p.x);
    // Where a dense block has inputs past the last, there are zeros. (Opaque: one comparison for each copy.)
    const int there = static_cast<int>(opaque(kDense || inside ? rows : 0));
    unsigned char* const to = stage + kStage.x;
#pragma unroll
    for (int i = 0; i < Pieces::kRows; ++i) {
      if (kClamped || i < there)
        cp_async(pieces.place(to, i), !kDense || inside ? x_rows[i] + input : x, !kDense || inside);
    }
  }

  __device__ void advance() {
    if (at.advance(p, tiles)) {
      start_unit();
    } else {
      weight.advance();
    }
  }

  // Group of a block of 32 inputs.
  __device__ static int group_of(const Params& p, int block)
    requires(!kDense)
  {
    if (kForm == GemmForm::kAny) return p.weight.group_of(block);
    // Only groups of 32 have a reciprocal of more than 32 bits.
    return static_cast<int>(__umulhi(static_cast<uint32_t>(block), static_cast<uint32_t>(p.weight.group_reciprocal)));
  }

  // Bytes of a scale or a min.
  __device__ static int scale_size(const Params& p)
    requires(!kDense)
  {
    return kForm != GemmForm::kAny || p.weight.scale_dtype == DType::kFloat16 ? 2 : 4;
  }

  __device__ static bool has_mins(const Params& p)
    requires(!kDense)
  {
    return kForm == GemmForm::kAny ? p.weight.mins != nullptr : kForm == GemmForm::kMins;
  }

  __device__ static int mins_offset(const Params& p) {
    return (kOneGroup ? 1 : p.plan.chunk_groups) * kScaleBytes;
  }

 private:
  const Params& p;
  const TokenTiles<kGrouped>& tiles;
  GemmPosition<kGrouped> at;
  typename Weight::template Copy<kChunk, kThreads, kClamped> weight;
  const T* x_rows[Pieces::kRows];
  int rows;  // of this thread's pieces that there are
  // A thread copies one piece of the chunk's scales at most: if the group's first one comes before this.
  int scale_limit;
  uint32_t first_scales;  // the piece of the unit's first group

  __device__ void start_unit() {
    weight.start(p, at.expert_tile.expert, at.row_unit, at.chunk);
    const int first = at.first_token(p);
    rows = pieces.limit(at.end_token(p) - first);
#pragma unroll
    for (int i = 0; i < Pieces::kRows; ++i) {
      int64_t row = first + pieces.row + i * Pieces::kStep;
      if constexpr (kClamped) row = min(row, p.m - 1);
      if constexpr (kGrouped) row = i < rows ? p.expert_rows.x_row(row) : 0;
      x_rows[i] = static_cast<const T*>(p.x) + row * p.x_stride;
    }
    if constexpr (!kDense) {
      const int size = scale_size(p), thread = opaque(threadIdx.x);  // 16 scales are `size` pieces
      const int tile = thread / (p.plan.chunk_groups * size), piece = thread % (p.plan.chunk_groups * size);
      const int tiles = (static_cast<int>(p.n) + kTileRows - 1) / kTileRows;
      const int row_pieces = p.weight.groups * size, row_tile = at.row_unit * kGemmRowTiles + tile;
      scale_limit = tile < kGemmRowTiles && row_tile < tiles ? row_pieces - piece : 0;
      first_scales = (at.expert_tile.expert * tiles + row_tile) * row_pieces + piece;
    }
  }

  // Scales and mins of the chunk's groups: of each row tile a run of memory.
  __device__ void load_scales(unsigned char* to) const
    requires(!kDense)
  {
    const int first = group_of(p, at.chunk * kBlocks) * scale_size(p);
    if (first >= scale_limit) return;
    const uint64_t offset = uint64_t{first_scales + first} * 16;
    cp_async(to, static_cast<const unsigned char*>(p.weight.scales) + offset);
    if (has_mins(p)) cp_async(to + mins_offset(p), static_cast<const unsigned char*>(p.weight.mins) + offset);
  }
};

}  // namespace fastinfer::cuda
