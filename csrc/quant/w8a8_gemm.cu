// Integer products on the tensor cores. The weight is mma's M side, as packed: a lane's 16 bytes of a block of 16 rows
// by 32 inputs are its A fragment. Tokens are the N side, eight at a time, so that few of them waste nothing; their
// rows become B fragments by ldmatrix. Copies to shared memory run `stages - 1` chunks ahead.
#include "quant/w8a8_gemm.h"

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "quant/w8a8_gemm_epilogue_cuda.h"

namespace fastinfer::cuda {
namespace {

constexpr int kBlockBytes = kTileRows * kBlockInputs;

template <int kTokens>
struct W8a8Kernel {
  static constexpr W8a8Tile kTile = w8a8_tile(kTokens);
  static constexpr int kBlocks = kTile.chunk / kBlockInputs;  // per chunk: even, because a warp takes two at once
  static constexpr int kWeightBytes = kW8a8Rows * kTile.chunk;
  static constexpr int kStageBytes = kTile.stage_bytes();
  // With 128 tokens each warp has 32 rows by 64 tokens, to read shared memory less often; else 16 rows by all tokens.
  static constexpr int kWarpsTokens = kTokens == 128 ? 2 : 1;
  static constexpr int kRowTiles = kWarpsTokens;
  static constexpr int kTokenTiles = kTokens / 8 / kWarpsTokens;

  const W8a8GemmParams& p;
  const int lane, first_row_tile, first_token_tile;  // of the warp, within the unit
  int32_t sums[kRowTiles][kTokenTiles][4] = {};

  __device__ explicit W8a8Kernel(const W8a8GemmParams& params)
      : p(params),
        lane(threadIdx.x % kWarpSize),
        first_row_tile(threadIdx.x / kWarpSize / kWarpsTokens * kRowTiles),
        first_token_tile(threadIdx.x / kWarpSize % kWarpsTokens * kTokenTiles) {}

  // [row tile, block, 512 bytes]; zeros past the weight's end.
  __device__ void load_weight(unsigned char* stage, int chunk) const {
    constexpr int kRun = kBlocks * kBlockBytes / 16;  // pieces of a row tile
    const int64_t tiles = (p.n + kTileRows - 1) / kTileRows, blocks = p.k / kBlockInputs;
    const int64_t first_tile = static_cast<int64_t>(blockIdx.x / p.w8a8_plan.token_tiles) * (kW8a8Rows / kTileRows);
#pragma unroll 1  // addresses of several copies at once would spill
    for (int i = threadIdx.x; i < kW8a8Rows / kTileRows * kRun; i += kW8a8Threads) {
      const int64_t tile = first_tile + i / kRun,
                    block = static_cast<int64_t>(chunk) * kBlocks + i % kRun * 16 / kBlockBytes;
      const bool valid = tile < tiles && block < blocks;
      const int64_t offset = (tile * blocks + block) * kBlockBytes + i % kRun * 16 % kBlockBytes;
      const unsigned char* const from = static_cast<const unsigned char*>(p.weight.q) + (valid ? offset : 0);
      cp_async(stage + i * 16, from, valid);
    }
  }

  // [token, chunk], swizzled; zeros past the last token and the last input.
  __device__ void load_x(unsigned char* stage, int chunk) const {
    constexpr int kPieces = kTile.chunk / 16;
    const int64_t first_token = static_cast<int64_t>(blockIdx.x % p.w8a8_plan.token_tiles) * kTokens;
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens * kPieces; i += kW8a8Threads) {
      const int64_t token = first_token + i / kPieces;
      const int64_t input = static_cast<int64_t>(chunk) * kTile.chunk + i % kPieces * 16;
      const bool valid = token < p.m && input < p.k;
      const int byte = i % kPieces * 16 ^ matrix_swizzle(kTile.chunk, i / kPieces);
      unsigned char* to = stage + kWeightBytes + i / kPieces * kTile.chunk + byte;
      cp_async(to, static_cast<const unsigned char*>(p.x) + (valid ? token * p.k + input : 0), valid);
    }
  }

  __device__ void multiply(const unsigned char* stage) {
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t a[kRowTiles][2][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned char* at = stage + ((first_row_tile + r) * kBlocks + block + i) * kBlockBytes + lane * 16;
          const uint4 q = *reinterpret_cast<const uint4*>(at);
          a[r][i][0] = q.x, a[r][i][1] = q.y, a[r][i][2] = q.z, a[r][i][3] = q.w;
        }
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        // Four matrices of eight tokens by 16 bytes: both halves of two blocks.
        const int token = (first_token_tile + n) * 8 + lane % 8;
        uint32_t b[4];
        const int byte = (block * kBlockInputs + lane / 8 * 16) ^ matrix_swizzle(kTile.chunk, lane);
        ldmatrix(b, stage + kWeightBytes + token * kTile.chunk + byte);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_int8(sums[r][n], a[r][0], {b[0], b[1]});
          mma_int8(sums[r][n], a[r][1], {b[2], b[3]});
        }
      }
    }
  }

  __device__ void share_sums(int32_t* shared) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = (first_token_tile + n) * 8 + lane % 4 * 2 + i % 2;
          const int row = (first_row_tile + r) * kTileRows + lane / 4 + i / 2 * 8;
          shared[token * kW8a8SumsStride + split_place(kW8a8Rows, row)] = sums[r][n][i];
        }
      }
    }
  }

  __device__ void run() {
    constexpr int kAhead = kTile.stages - 1;
    unsigned char* const shared = dynamic_shared();
    const auto stage = [&](int i) { return shared + i % kTile.stages * kStageBytes; };
    const int first = static_cast<int>(blockIdx.y) * p.w8a8_plan.split_chunks;
    const int count = min(p.w8a8_plan.split_chunks, p.w8a8_plan.chunks - first);
    if (!p.constant_weights) grid_dependency_wait();
#pragma unroll 1
    for (int i = 0; i < min(kAhead, count); ++i) load_weight(stage(i), first + i);
    grid_dependency_wait();
    grid_dependency_launch();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      if (i < count) load_x(stage(i), first + i);
      cp_async_commit();
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<kAhead - 1>();
      __syncthreads();  // chunk i is there for everybody, and nobody reads chunk i - 1 any more
      if (i + kAhead < count) {
        load_weight(stage(i + kAhead), first + i + kAhead);
        load_x(stage(i + kAhead), first + i + kAhead);
      }
      cp_async_commit();
      multiply(stage(i));
    }
    cp_async_wait<0>();
    __syncthreads();
    auto* const shared_sums = reinterpret_cast<int32_t*>(shared);
    share_sums(shared_sums);
    __syncthreads();
    W8a8Epilogue(p, shared_sums).store();
  }
};

template <int kTokens>
__global__ void __launch_bounds__(kW8a8Threads, 2) w8a8_gemm_kernel(const __grid_constant__ W8a8GemmParams p) {
  W8a8Kernel<kTokens>(p).run();
}

}  // namespace

void w8a8_gemm(const W8a8GemmParams& p, void* stream) {
  const auto kernel = [&] {
    switch (p.w8a8_plan.tile.tokens) {
      case 8: return w8a8_gemm_kernel<8>;
      case 16: return w8a8_gemm_kernel<16>;
      case 32: return w8a8_gemm_kernel<32>;
      case 64: return w8a8_gemm_kernel<64>;
      default: return w8a8_gemm_kernel<128>;
    }
  }();
  launch("w8a8_gemm", kernel, p.w8a8_plan.launch, stream, p);
}

}  // namespace fastinfer::cuda
