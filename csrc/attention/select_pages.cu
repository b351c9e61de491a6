// A token's pages for one KV head, by several blocks:
//
//   each block, for a part of the pages: their bounds for each query head of the group  ->  workspace
//   the block that comes last: weights of the pages  ->  the least one that is chosen  ->  the chosen pages, in order
//
// A lane reads 16 bytes at once. A page's bounds and weight do not depend on how the pages are divided, and counts of
// integers are exact in any order, so results depend neither on the launch nor on timing. See select_pages_cpu.cpp for
// what bounds and weights are.
#include "attention/select_pages.h"

#include <cfloat>

#include "attention/seen_positions_cuda.h"
#include "attention/select_largest_cuda.h"
#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

// Of weights' bits, which are in the order of the weights, as these are not negative.
using Choice = SelectLargest<kSelectThreads, kSelectDigitBits>;

// Selects the pages of one KV head of a token, by one block or by a part of them.
class PageSelection {
 public:
  __device__ PageSelection(const SelectPagesParams& p, const int32_t* blocks, int count)
      : p_(p),
        blocks_(blocks + kFirstPages),
        count_(count - kFirstPages - kLastPages),
        group_(p.q_heads / p.kv_heads),
        head_(static_cast<int>(blockIdx.x % p.kv_heads)),
        bounds_(p.workspace + static_cast<int64_t>(blockIdx.x) * group_ * p.max_blocks),
        queries_(reinterpret_cast<float*>(dynamic_shared())),
        numbers_(queries_ + max(group_ * 2 * p.head_dim, static_cast<int>(kSelectLargestBytes / sizeof(float)))),
        softmax_(numbers_ + kSelectWarps) {}

  // Writes the bounds of the pages of this part. Returns true in the block that comes last.
  template <class T, int kOwn>
  __device__ bool bound() const {
    const int round = static_cast<int>(blockDim.x) / p_.plan.lanes * pages_at_once(kOwn);
    const int parts = min(p_.plan.parts, (count_ + round - 1) / round), part = static_cast<int>(blockIdx.y);
    if (part >= parts) return false;
    load_queries<T>();
    __syncthreads();
    for (int first = part * round; first < count_; first += parts * round) bound_round<kOwn>(first);
    return last_to_arrive(p_.arrived + blockIdx.x, parts);
  }

  // Writes `width` pages.
  __device__ void choose(int32_t* out) const {
    const int chosen = p_.width - kFirstPages - kLastPages;
    weigh();
    if (threadIdx.x == 0) out[0] = blocks_[-kFirstPages];
    if (threadIdx.x < kLastPages) out[kFirstPages + chosen + threadIdx.x] = blocks_[count_ + threadIdx.x];
    const Choice choice(reinterpret_cast<int*>(queries_));
    const auto weight = [&](int page) { return __float_as_uint(bounds_[page]); };
    const auto put = [&](int place, int page) { out[kFirstPages + place] = blocks_[page]; };
    choice.for_each_selected(count_, choice.find_limit(count_, chosen, weight), weight, put);
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x % kWarpSize);
  }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x / kWarpSize);
  }
  __device__ float* bounds_of(int head) const {
    return bounds_ + head * p_.max_blocks;
  }

  // queries_[group][2][head_dim]: the negative and the positive elements.
  template <class T>
  __device__ void load_queries() const {
    const int64_t token = blockIdx.x / p_.kv_heads;
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride + int64_t{head_} * group_ * p_.head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < group_ * p_.head_dim; i += static_cast<int>(blockDim.x)) {
      const float v = to_float(q[i]);
      float* const row = queries_ + i / p_.head_dim * 2 * p_.head_dim + i % p_.head_dim;
      row[0] = v > 0.0f ? 0.0f : v;  // a NaN stays
      row[p_.head_dim] = v < 0.0f ? 0.0f : v;
    }
  }

  // The bounds of some pages from `first` on, for each query head. All lanes of a warp call it.
  template <int kOwn>
  __device__ void bound_round(int first) const {
    constexpr int kPages = pages_at_once(kOwn);
    const int vectors = p_.head_dim / 4, rank = static_cast<int>(threadIdx.x) % p_.plan.lanes;
    const int page = first + static_cast<int>(threadIdx.x) / p_.plan.lanes * kPages;
    Vector<__nv_bfloat16, 8> x[kPages][kOwn] = {};
#pragma unroll
    for (int j = 0; j < kPages; ++j) {
      if (page + j >= count_) continue;
      const __nv_bfloat16* const row = reinterpret_cast<const __nv_bfloat16*>(p_.bounds) +
                                       (int64_t{blocks_[page + j]} * p_.kv_heads + head_) * 2 * p_.head_dim;
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const int vector = rank + own * p_.plan.lanes;
        if (vector < vectors) x[j][own] = load_vector<8>(row + vector * 8);
      }
    }
    for (int head = 0; head < group_; ++head) {
      float sums[kPages] = {};
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        const int vector = rank + own * p_.plan.lanes;
        if (vector >= vectors) continue;
        const auto q = load_vector<8>(queries_ + head * 2 * p_.head_dim + vector * 8);
#pragma unroll
        for (int j = 0; j < kPages; ++j) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[j] += q.values[i] * to_float(x[j][own].values[i]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPages; ++j) {
        for (int offset = p_.plan.lanes / 2; offset > 0; offset /= 2) {
          sums[j] += __shfl_xor_sync(kFullMask, sums[j], offset);
        }
        if (rank == 0 && page + j < count_) bounds_of(head)[page + j] = sums[j] * p_.scale;
      }
    }
  }

  // Replaces the first head's bounds by the weights: the sum over the heads of the softmax of their bounds. The weight
  // of a page with an infinity or a NaN is infinite, and counts for no other. A thread has the same pages throughout.
  __device__ void weigh() const {
    for (int head = 0; head < group_; ++head) {
      float largest = -FLT_MAX, sum = 0.0f;
      for_each_page([&](int page) {
        const float v = __ldcg(bounds_of(head) + page);  // other blocks wrote it
        if (v < INFINITY) largest = fmaxf(largest, v);
      });
      largest = block_max(largest);
      for_each_page([&](int page) {
        const float v = __ldcg(bounds_of(head) + page);
        if (v < INFINITY) sum += expf(v - largest);
      });
      __syncthreads();  // before numbers_ is used again
      sum = block_sum(sum, numbers_);
      if (threadIdx.x == 0) softmax_[2 * head] = largest, softmax_[2 * head + 1] = 1.0f / fmaxf(sum, FLT_MIN);
      __syncthreads();
    }
    for_each_page([&](int page) {
      float weight = 0.0f;
      for (int head = 0; head < group_; ++head) {
        const float v = __ldcg(bounds_of(head) + page);
        weight += (v < INFINITY ? expf(v - softmax_[2 * head]) : INFINITY) * softmax_[2 * head + 1];
      }
      bounds_[page] = weight;
    });
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
  const int32_t* blocks_;  // without the first page
  int count_;              // without the first page and the last ones
  int group_, head_;
  float* bounds_;  // [group][max_blocks]
  float *queries_, *numbers_, *softmax_;
};

template <class T, int kOwn>
__global__ void __launch_bounds__(kSelectThreads, kSelectBlocks)
    select_pages_kernel(const __grid_constant__ SelectPagesParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x / p.kv_heads;
  const SeenPositions seen(p, token);
  const int seen_pages = (seen.count + p.block_size - 1) / p.block_size;
  int32_t* const out = p.pages + static_cast<int64_t>(blockIdx.x) * p.width;
  const int pages = min(seen_pages, p.width);
  if (blockIdx.x % p.kv_heads == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    p.lens[token] = seen.count - (seen_pages - pages) * p.block_size;
  }
  if (seen_pages > p.width) {
    const PageSelection selection(p, seen.blocks, seen_pages);
    if (selection.bound<T, kOwn>()) selection.choose(out);
  } else if (blockIdx.y == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < pages; i += kSelectThreads) out[i] = seen.blocks[i];
  }
}

}  // namespace

void select_pages(const SelectPagesParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto kernel = p.plan.own == 1   ? select_pages_kernel<T, 1>
                        : p.plan.own == 2 ? select_pages_kernel<T, 2>
                                          : select_pages_kernel<T, 4>;
    launch("select_pages", kernel, p.plan.launch, stream, p);
  });
}

}  // namespace fastinfer::cuda
