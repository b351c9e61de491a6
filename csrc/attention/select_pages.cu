// A token's pages for one KV head, by several blocks:
//
//   each block, for a part of the pages: their logits for each query head of the group  ->  workspace
//   the block that comes last: weights of the pages  ->  the least one that is chosen  ->  the chosen pages, in order
//
// Weights are integers that add up to about kSumOfWeights, and the largest are chosen until they have the wanted share.
//
// A page's logit is the logarithm of the sum of its tokens' estimated exp(logit); a lane has a token, and neighbouring
// lanes read neighbouring words. Neither this logit nor a page's weight depends on how the pages are divided, and
// counts of integers are exact in any order, so results depend neither on the launch nor on timing.
#include "attention/select_pages.h"

#include <cfloat>
#include <climits>

#include "attention/key_codes_cuda.h"
#include "attention/seen_positions_cuda.h"
#include "attention/select_largest_cuda.h"
#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"

namespace fastinfer::cuda {
namespace {

// Of weights' bits, which are in the order of the weights, as these are not negative.
using Choice = SelectLargest<kSelectThreads, kSelectDigitBits>;

constexpr int kHeadsAtOnce = 4;           // that share a token's codes
constexpr uint32_t kAlways = UINT32_MAX;  // in the place of the weight of a page that is read in any case

// Selects the pages of one KV head of a token, by one block or by a part of them.
class PageSelection {
 public:
  __device__ PageSelection(const SelectPagesParams& p, const SeenPositions& seen, int count)
      : p_(p),
        blocks_(seen.blocks),
        positions_(seen.count),
        count_(count),
        group_(p.q_heads / p.kv_heads),
        head_(static_cast<int>(blockIdx.x % p.kv_heads)),
        logits_(p.workspace + static_cast<int64_t>(blockIdx.x) * group_ * p.max_blocks),
        scratch_(reinterpret_cast<float*>(dynamic_shared())),
        numbers_(scratch_ + select_pages_scratch(group_, p.head_dim) / sizeof(float)),
        softmax_(numbers_ + kSelectWarps) {}

  // Writes the logits of the pages of this part. Returns true in the block that comes last.
  template <class T>
  __device__ bool estimate() const {
    const int round = static_cast<int>(blockDim.x) / p_.plan.lanes;
    const int parts = min(p_.plan.parts, (count_ + round - 1) / round), part = static_cast<int>(blockIdx.y);
    if (part >= parts) return false;
    load_queries<T>();
    __syncthreads();
    for (int first = part * round; first < count_; first += parts * round) {
      const int page = first + static_cast<int>(threadIdx.x) / p_.plan.lanes;
      int head = 0;
      for (; head + kHeadsAtOnce <= group_; head += kHeadsAtOnce) estimate_page<kHeadsAtOnce>(page, head);
      for (; head < group_; ++head) estimate_page<1>(page, head);
    }
    return last_to_arrive(p_.arrived + blockIdx.x, parts);
  }

  // Writes the chosen pages, and returns their number.
  __device__ int choose(int32_t* out) const {
    const Choice choice(reinterpret_cast<int*>(scratch_));
    const auto number = [&](int page) { return __float_as_uint(logits_[page]); };
    const auto amount = [](uint32_t own) { return own == kAlways ? 0 : static_cast<int>(own); };
    const int wanted = weigh();
    typename Choice::Limit limit{kAlways - 1, 0};
    if (wanted > 0) limit = {choice.find_limit(count_, wanted, number, amount).number, INT_MAX};
    return choice.for_each_selected(count_, limit, number, [&](int place, int page) { out[place] = blocks_[page]; });
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x % kWarpSize);
  }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x / kWarpSize);
  }
  __device__ float* logits_of(int head) const {
    return logits_ + head * p_.max_blocks;
  }

  // What a query head's products with codes become logits by, see select_pages_cpu.cpp.
  struct Query {
    int offset;
    float factor;
  };
  __device__ int* query_bytes() const {  // [group][head_dim / 4]
    return reinterpret_cast<int*>(scratch_);
  }
  __device__ Query* queries() const {  // [group]
    return reinterpret_cast<Query*>(query_bytes() + group_ * (p_.head_dim / 4));
  }

  template <class T>
  __device__ void load_queries() const {
    const int64_t token = blockIdx.x / p_.kv_heads;
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride + int64_t{head_} * group_ * p_.head_dim;
    float* const row = reinterpret_cast<float*>(queries() + group_) + warp() * p_.head_dim;
    for (int head = warp(); head < group_; head += kSelectWarps) {
      for (int i = lane(); i < p_.head_dim; i += kWarpSize) row[i] = to_float(q[head * p_.head_dim + i]);
      rotate_by_warp(row, p_.head_dim);
      const RowScale scale = row_scale<int8_t>(largest_of_row(row, p_.head_dim));
      int sum = 0;
      for (int word = lane(); word < p_.head_dim / 4; word += kWarpSize) {
        uint32_t bytes = 0;
        for (int i = 0; i < 4; ++i) {
          const int byte = from_float<int8_t>(scale.apply(row[word * 4 + i]));
          bytes |= (static_cast<uint32_t>(byte) & 0xffu) << (8 * i);
          sum += byte;
        }
        query_bytes()[head * (p_.head_dim / 4) + word] = static_cast<int>(bytes);
      }
      sum = warp_sum(sum);
      if (lane() == 0) {
        queries()[head] = {static_cast<int>(2 * kLargestKeyLevel) * sum,
                           p_.scale * scale.scale / (2.0f * static_cast<float>(hadamard_size(p_.head_dim)))};
      }
      __syncwarp();  // before the next row is written
    }
  }

  // The logit of a page for kHeads query heads, by plan.lanes lanes; infinity if one of its tokens has an infinity or a
  // NaN. All lanes of a warp call it.
  template <int kHeads>
  __device__ void estimate_page(int page, int head) const {
    const int words = key_code_words(p_.head_dim) - 1, rank = static_cast<int>(threadIdx.x) % p_.plan.lanes;
    float largest[kHeads], sum[kHeads];
    for (int r = 0; r < kHeads; ++r) largest[r] = -FLT_MAX, sum[r] = 0.0f;
    if (page < count_) {
      const uint32_t* const codes =
          p_.codes + (int64_t{blocks_[page]} * p_.kv_heads + head_) * (words + 1) * p_.block_size;
      const int tokens = min(p_.block_size, positions_ - page * p_.block_size);
      for (int token = rank; token < tokens; token += p_.plan.lanes) {
        int products[kHeads] = {};
        const int* const bytes = query_bytes() + head * (p_.head_dim / 4);
#pragma unroll 8
        for (int word = 0; word < words; ++word) {
          const uint32_t own = codes[word * p_.block_size + token];
#pragma unroll
          for (int r = 0; r < kHeads; ++r) {
            const int* const q = bytes + r * (p_.head_dim / 4) + 2 * word;
            products[r] = __dp4a(q[0], static_cast<int>(own & 0x0f0f0f0fu), products[r]);
            products[r] = __dp4a(q[1], static_cast<int>(own >> 4 & 0x0f0f0f0fu), products[r]);
          }
        }
        const float scale = __uint_as_float(codes[words * p_.block_size + token]);
        for (int r = 0; r < kHeads; ++r) {
          const Query query = queries()[head + r];
          const float logit = static_cast<float>(2 * products[r] - query.offset) * (scale * query.factor);
          add_logit(logit, 1.0f, largest[r], sum[r]);
        }
      }
    }
    for (int r = 0; r < kHeads; ++r) {
      for (int offset = p_.plan.lanes / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(kFullMask, largest[r], offset);
        add_logit(other, __shfl_xor_sync(kFullMask, sum[r], offset), largest[r], sum[r]);
      }
      if (rank == 0 && page < count_) {
        logits_of(head + r)[page] = sum[r] < INFINITY ? largest[r] + logf(sum[r]) : INFINITY;
      }
    }
  }

  // Adds exp(logit) `count` times to sum exp(largest), where `largest` grows. What is infinite stays so.
  __device__ static void add_logit(float logit, float count, float& largest, float& sum) {
    if (!(logit < INFINITY)) count = INFINITY, logit = largest;
    const float top = fmaxf(largest, logit);
    sum = sum * expf(largest - top) + count * expf(logit - top);
    largest = top;
  }

  // Replaces the first head's logits by the weights: the sum over the heads of the softmax of their logits. A page with
  // an infinity or a NaN is read in any case, and counts for no other. A thread has the same pages throughout. Returns
  // the weight that is to be chosen beside the pages that are read in any case.
  __device__ int weigh() const {
    for (int head = 0; head < group_; ++head) {
      float largest = -FLT_MAX, sum = 0.0f;
      for_each_page([&](int page) {
        const float v = __ldcg(logits_of(head) + page);  // other blocks wrote it
        if (v < INFINITY) largest = fmaxf(largest, v);
      });
      largest = block_max(largest);
      for_each_page([&](int page) {
        const float v = __ldcg(logits_of(head) + page);
        if (v < INFINITY) sum += expf(v - largest);
      });
      __syncthreads();  // before numbers_ is used again
      sum = block_sum(sum, numbers_);
      if (threadIdx.x == 0) softmax_[2 * head] = largest, softmax_[2 * head + 1] = 1.0f / fmaxf(sum, FLT_MIN);
      __syncthreads();
    }
    const float unit = kSumOfWeights / static_cast<float>(group_);
    int sum = 0, present = 0;
    for_each_page([&](int page) {
      float weight = 0.0f;
      for (int head = 0; head < group_; ++head) {
        const float v = __ldcg(logits_of(head) + page);
        weight += (v < INFINITY ? expf(v - softmax_[2 * head]) : INFINITY) * softmax_[2 * head + 1];
      }
      const int own = weight < INFINITY ? static_cast<int>(weight * unit) : 0;
      const bool always = page < kFirstPages || page >= count_ - kLastPages;
      sum += own, present += always ? own : 0;
      logits_[page] = __uint_as_float(always || !(weight < INFINITY) ? kAlways : static_cast<uint32_t>(own));
    });
    auto* const totals = reinterpret_cast<int*>(numbers_);
    sum = block_sum(sum, totals);
    __syncthreads();  // before numbers_ is used again
    present = block_sum(present, totals);
    return static_cast<int>(wanted_weight(sum, p_.share) - present);
  }

  __device__ float block_max(float value) const {
    value = warp_max(value);
    if (lane() == 0) numbers_[warp()] = value;
    __syncthreads();
    return warp_max(lane() < kSelectWarps ? numbers_[lane()] : -FLT_MAX);
  }

  template <class Fn>
  __device__ void for_each_page(const Fn& fn) const {
    for (int page = static_cast<int>(threadIdx.x); page < count_; page += static_cast<int>(blockDim.x)) fn(page);
  }

  const SelectPagesParams& p_;
  const int32_t* blocks_;
  int positions_, count_;  // that the token sees, and their pages
  int group_, head_;
  float* logits_;  // [group][max_blocks]
  float *scratch_, *numbers_, *softmax_;
};

template <class T>
__global__ void __launch_bounds__(kSelectThreads, kSelectBlocks)
    select_pages_kernel(const __grid_constant__ SelectPagesParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x / p.kv_heads;
  const SeenPositions seen(p, token);
  const int pages = (seen.count + p.block_size - 1) / p.block_size;
  int32_t* const out = p.pages + blockIdx.x * p.max_blocks;
  int chosen = pages;
  if (p.reads_all(pages)) {
    if (blockIdx.y > 0) return;
    for (int i = static_cast<int>(threadIdx.x); i < pages; i += kSelectThreads) out[i] = seen.blocks[i];
  } else {
    const PageSelection selection(p, seen, pages);
    if (!selection.estimate<T>()) return;
    chosen = selection.choose(out);
  }
  if (threadIdx.x == 0) p.lens[blockIdx.x] = seen.count - (pages - chosen) * p.block_size;
}

}  // namespace

void select_pages(const SelectPagesParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) { launch("select_pages", select_pages_kernel<T>, p.plan.launch, stream, p); });
}

}  // namespace fastinfer::cuda
