// How paged attention is launched on a GPU, and the work plan that its blocks follow; see paged_attention.cu.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/api.h"
#include "common/dtype.h"
#include "common/launch_config.h"
#include "common/shared_layout.h"

namespace fastinfer {

struct PagedAttentionPlanParams {
  const int32_t* seq_lens;     // [seqs], the queries included; or [seqs, kv_heads]
  const int32_t* query_start;  // [seqs + 1]
  int32_t* plan;               // PagedAttentionPlan::plan_ints
  int64_t seqs;
  bool table_per_head;  // each KV head has lengths of its own
  int q_heads;
  int kv_heads;
  int head_dim;
  int window;  // 0: none
  bool chunked;
  int blocks;  // blocks of the attention kernel
  bool batch_invariant;

  // Number of lengths.
  FASTINFER_HOST_DEVICE int64_t lens() const {
    return table_per_head ? seqs * kv_heads : seqs;
  }
};

}  // namespace fastinfer

namespace fastinfer::cpu {
inline void paged_attention_plan(const PagedAttentionPlanParams&) {}  // the CPU kernel plans as it goes
}  // namespace fastinfer::cpu

namespace fastinfer::cuda {

FASTINFER_API void paged_attention_plan(const PagedAttentionPlanParams& params, void* stream);

// ---- launch policy ----

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / 32;
// Up to so many rows, and with a plan that cuts, the warps split the positions instead of the rows.
inline constexpr int kDecodeRows = 16;

inline constexpr int kHeadDims[] = {64, 80, 96, 128, 256, 512};

// Of keys whose first elements are the values (multi-head latent attention).
FASTINFER_HOST_DEVICE constexpr bool has_latents(int head_dim) {
  return head_dim == 320 || head_dim == 576;
}

// Elements of a value.
FASTINFER_HOST_DEVICE constexpr int value_columns(int head_dim) {
  return has_latents(head_dim) ? head_dim - 64 : head_dim;
}

// Query rows of a tile, 32 a warp: what ldmatrix reads of K and V serves two products each. At 256 the sums of 16 rows
// already fill the registers, and at 512 two warps have the same rows, and half of V's columns each. With latents all
// warps have the same rows, and a quarter of the values' columns each.
FASTINFER_HOST_DEVICE constexpr int row_tile(int head_dim) {
  return head_dim > 256 ? 32 : head_dim > 128 ? 64 : 128;
}

// Positions of a KV tile: from 256 on two stages of K and V must leave room for Q in the 99 KB of sm_86 and sm_89.
FASTINFER_HOST_DEVICE constexpr int kv_tile(int head_dim) {
  return head_dim > 256 ? 16 : head_dim > 128 ? 32 : 64;
}

// Head sizes whose prefill is multiplied by a warpgroup where the GPU has such products.
FASTINFER_HOST_DEVICE constexpr bool prefill_by_warpgroups(int head_dim) {
  return head_dim == 64 || head_dim == 128;
}

// With latents: tiles of K in shared memory, and the logits of one, whose rows are apart so that 8-byte accesses by
// eight lanes in a row and a quarter of it meet different banks.
inline constexpr int kLatentStages = 3, kLatentScoreStride = 24;
inline constexpr int kLatentScoreBytes = 32 * kLatentScoreStride * 4;

// Rows of Q, and a tile of K and V in 16 bits; behind them one in 8 bits, and two stages of its scales. Decode has
// fewer rows and more stages instead, with its statistics behind them at 512. With two blocks a multiprocessor it is
// all that an A100 has.
constexpr size_t attention_shared_bytes(int head_dim) {
  const int tile = kv_tile(head_dim);
  if (has_latents(head_dim)) return (row_tile(head_dim) + kLatentStages * tile) * head_dim * 2 + kLatentScoreBytes;
  return static_cast<size_t>((row_tile(head_dim) + 2 * tile) * head_dim * 2 + 2 * tile * head_dim +
                             (2 * 2 * tile + (head_dim > 256 ? 2 * tile : 0)) * static_cast<int>(sizeof(float)));
}

// Floats from row to row of results in the workspace, of which split_place tells the columns.
FASTINFER_HOST_DEVICE constexpr int result_stride(int head_dim) {
  return 2 * split_half(value_columns(head_dim));
}

// A block's part of a row tile that it shares with other blocks: the rows' results, then maxima and sums of
// exponentials. A block has one at its begin and one at its end.
FASTINFER_HOST_DEVICE constexpr int64_t partial_floats(int head_dim) {
  return int64_t{row_tile(head_dim)} * (result_stride(head_dim) + 2);
}

inline constexpr LaunchConfig kPlanLaunch{.grid = 1, .block = 256, .shared_bytes = 64, .dependent = true};

constexpr LaunchConfig attention_launch(int head_dim, int64_t blocks) {
  return {
      .grid = blocks, .block = kAttentionThreads, .shared_bytes = attention_shared_bytes(head_dim), .dependent = true};
}

struct PagedAttentionPlan {
  int kv_tile;              // positions
  int64_t plan_ints;        // size of the work plan, int32
  int64_t workspace_bytes;  // partial results
  LaunchConfig plan;
  LaunchConfig attention;  // any batch, however long: blocks without work end at once
};

// Of so many lengths: of sequences, or of each one's KV heads.
inline PagedAttentionPlan plan_paged_attention(int64_t lens, int64_t head_dim, const Device& device) {
  const bool known = std::find(std::begin(kHeadDims), std::end(kHeadDims), head_dim) != std::end(kHeadDims);
  if (!known && !has_latents(static_cast<int>(head_dim))) {
    throw std::runtime_error(
        "paged_attention: on CUDA q must have a head_dim of 64, 80, 96, 128, 256 or 512, or with "
        "values in the keys of 320 or 576, got " +
        std::to_string(head_dim));
  }
  const int columns = static_cast<int>(head_dim);
  const size_t shared = attention_shared_bytes(columns);
  // Two blocks hide each other's barriers; 1 KB of shared memory per block is the system's. Registers allow two.
  const size_t fit = (device.shared_bytes + 1024) / (shared + 1024);
  const int64_t blocks = device.multiprocessors * static_cast<int64_t>(std::clamp<size_t>(fit, 1, 2));
  return {
      .kv_tile = kv_tile(columns),
      .plan_ints = 4 + 4 * blocks + 2 * lens + 2 * blocks,  // PlanView
      .workspace_bytes = blocks * 2 * partial_floats(columns) * int64_t{sizeof(float)},
      .plan = kPlanLaunch,
      .attention = attention_launch(columns, blocks),
  };
}

}  // namespace fastinfer::cuda
