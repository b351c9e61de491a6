// A token's chosen positions, by two kernels:
//
//   several blocks, each for a part of the positions: their scores  ->  workspace
//   one block: the least score that is chosen  ->  the slots of the chosen positions, in order
//
// A warp multiplies 32 keys, which it reads from the cache straight into the fragments of mma, with eight heads at a
// time. Products are sums over the elements of a head, in any order: lane t of four has elements 8t .. 8t + 7 of each
// 32 in both fragments, 16 bytes in a row, in the place of those that mma names. A score depends on its query and its
// key alone, and the same operations make it wherever it lies, so results depend neither on the launch nor on timing.
#include "attention/select_tokens.h"

#include "attention/seen_positions_cuda.h"
#include "attention/select_largest_cuda.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

using Choice = SelectLargest<kChooseThreads, kChooseDigitBits>;
using Words = Vector<uint32_t, 4>;  // eight elements

__device__ int64_t slot_of(const SelectTokensParams& p, const int32_t* blocks, int position) {
  const int entry = position / p.block_size;
  return int64_t{blocks[entry]} * p.block_size + (position - entry * p.block_size);
}

// Scores in ascending order, a NaN behind all, so that attention shows it. Sums that begin with 0 are never -0.
__device__ uint32_t ordered_score(float score) {
  if (score != score) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Scores positions for one token, by one block.
template <class T>
class TokenScorer {
  static constexpr int kChunks = kIndexDim / 8, kGroups = kIndexDim / 32;
  static constexpr int kTiles = 2;  // of 16 positions, that a warp has
  static_assert(kScorePositions == kScoreThreads / kWarpSize * kTiles * 16);

 public:
  __device__ explicit TokenScorer(const SelectTokensParams& p)
      : p_(p),
        heads_(padded_heads(p.heads)),
        queries_(reinterpret_cast<Words*>(dynamic_shared())),
        weights_(reinterpret_cast<float*>(queries_ + heads_ * kChunks)) {}

  // Heads and elements beyond the last ones become zeros.
  __device__ void load_query(int64_t token) const {
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride;
    const T* const weights = static_cast<const T*>(p_.weights) + token * p_.weight_stride;
    const bool aligned = (reinterpret_cast<uintptr_t>(p_.q) | p_.q_stride * sizeof(T)) % 16 == 0;
    for (int i = static_cast<int>(threadIdx.x); i < heads_ * kChunks; i += kScoreThreads) {
      const int head = i / (kGroups * kWarpSize) * 8 + i % kWarpSize / 4;
      const int chunk = i / kWarpSize % kGroups * 4 + i % 4;
      Vector<T, 8> v{};
      if (head < p_.heads && chunk * 8 < p_.head_dim) {
        const T* const from = q + int64_t{head} * p_.head_dim + chunk * 8;
        if (aligned) {
          v = load_vector<8>(from);
        } else {
          for (int j = 0; j < 8; ++j) v.values[j] = from[j];
        }
      }
      store_vector(reinterpret_cast<T*>(queries_ + i), v);
    }
    for (int i = static_cast<int>(threadIdx.x); i < heads_; i += kScoreThreads) {
      weights_[i] = i < p_.heads ? to_float(weights[i]) : 0.0f;
    }
  }

  // The warp's 32 positions from `first` on, as far as the token sees them.
  __device__ void score(const SeenPositions& seen, int first, uint32_t* scores) const {
    Words keys[kTiles][2][kGroups];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) load_key(seen, first + 16 * tile + 8 * half + lane() / 4, keys[tile][half]);
    }
    float sums[kTiles][2] = {};
    for (int head = 2 * (lane() % 4), eight = 0; eight < heads_ / 8; head += 8, ++eight) {
      float products[kTiles][4] = {};
      multiply(keys, eight, products);
      const auto weight = load_vector<2>(weights_ + head);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float v = products[tile][2 * half + i];
            if (head + i < p_.heads) sums[tile][half] += weight.values[i] * (v < 0.0f ? 0.0f : v);  // a NaN stays
          }
        }
      }
    }
    float own = 0.0f;  // a lane writes the score of one position
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sums[tile][half];
        sum += __shfl_xor_sync(kFullMask, sum, 1);
        sum += __shfl_xor_sync(kFullMask, sum, 2);
        if (lane() % 4 == 2 * tile + half) own = sum;
      }
    }
    const int position = first + lane() % 4 * 8 + lane() / 4;
    if (position < seen.count) scores[position] = ordered_score(own);
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x % kWarpSize);
  }

  // This lane's elements of a key.
  __device__ void load_key(const SeenPositions& seen, int position, Words (&key)[kGroups]) const {
    const bool is_seen = position < seen.count;
    const T* const row = static_cast<const T*>(p_.keys) +
                         (is_seen ? slot_of(p_, seen.blocks, position) * p_.head_dim : 0) + lane() % 4 * 8;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool exists = is_seen && group * 32 + lane() % 4 * 8 < p_.head_dim;
      key[group] = exists ? load_vector<4>(reinterpret_cast<const uint32_t*>(row + group * 32)) : Words{};
    }
  }

  // The products of all keys with eight heads.
  __device__ void multiply(const Words (&keys)[kTiles][2][kGroups], int eight, float (&products)[kTiles][4]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const Words q = queries_[(eight * kGroups + group) * kWarpSize + lane()];
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const auto &low = keys[tile][0][group], &high = keys[tile][1][group];
          mma<T>(products[tile], {low.values[step], high.values[step], low.values[step + 1], high.values[step + 1]},
                 {q.values[step], q.values[step + 1]});
        }
      }
    }
  }

  const SelectTokensParams& p_;
  const int heads_;  // with those of zeros
  Words* queries_;   // [heads / 8][kGroups][lanes]
  float* weights_;
};

// `first` is the first token of the group.
template <class T>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_tokens_kernel(const __grid_constant__ SelectTokensParams p, int64_t first) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = first + blockIdx.x;
  const SeenPositions seen(p, token);
  const int begin = static_cast<int>(blockIdx.y) * kScorePositions;
  if (seen.count <= p.width || begin >= seen.count) return;
  const TokenScorer<T> scorer(p);
  scorer.load_query(token);
  __syncthreads();
  uint32_t* const scores = p.workspace + blockIdx.x * p.plan.stride;
  const int warp_first = static_cast<int>(threadIdx.x / kWarpSize) * (kScorePositions / (kScoreThreads / kWarpSize));
  for (int64_t i = begin + warp_first; i < seen.count; i += int64_t{p.plan.parts} * kScorePositions) {
    scorer.score(seen, static_cast<int>(i), scores);
  }
}

__global__ void __launch_bounds__(kChooseThreads)
    choose_tokens_kernel(const __grid_constant__ SelectTokensParams p, int64_t first) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = first + blockIdx.x;
  const SeenPositions seen(p, token);
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* const out = p.slots + token * p.width;
  if (thread == 0) p.lens[token] = min(seen.count, p.width);
  const auto put = [&](int place, int position) {
    out[place] = static_cast<int32_t>(slot_of(p, seen.blocks, position));
  };
  if (seen.count <= p.width) {
    for (int i = thread; i < seen.count; i += kChooseThreads) put(i, i);
    return;
  }
  const Choice choice(reinterpret_cast<int*>(dynamic_shared()));
  const uint32_t* const scores = p.workspace + blockIdx.x * p.plan.stride;
  const auto score = [&](int position) { return scores[position]; };
  choice.for_each_selected(seen.count, choice.find_limit(seen.count, p.width, score), score, put);
}

template <class T>
void launch_groups(const SelectTokensParams& p, void* stream) {
  for (int64_t first = 0; first < p.tokens; first += p.plan.group) {
    LaunchConfig score = p.plan.score, choose = p.plan.choose;
    score.grid = choose.grid = std::min(p.plan.group, p.tokens - first);
    if (p.plan.stride > 0) launch("score_tokens", score_tokens_kernel<T>, score, stream, p, first);
    launch("choose_tokens", choose_tokens_kernel, choose, stream, p, first);
  }
}

}  // namespace

void select_tokens(const SelectTokensParams& p, void* stream) {
  p.dtype == DType::kFloat16 ? launch_groups<__half>(p, stream) : launch_groups<__nv_bfloat16>(p, stream);
}

}  // namespace fastinfer::cuda
