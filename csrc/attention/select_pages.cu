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

#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int kDigits = 256;  // of a weight's bits, eight at a time

// What a token sees.
struct SeenPages {
  const int32_t* blocks = nullptr;  // a row of the block table
  int position = -1;
  int count = 0;

  __device__ SeenPages(const SelectPagesParams& p, int64_t token) {
    if (token >= p.query_start[p.seqs]) return;  // padding, which belongs to no sequence
    int64_t seq = 0, end = p.seqs;               // the last sequence that begins at or before the token
    while (end - seq > 1) {
      const int64_t middle = (seq + end) / 2;
      p.query_start[middle] <= token ? seq = middle : end = middle;
    }
    blocks = p.block_table + seq * p.max_blocks;
    // A length beyond the block table, which nobody has checked, must not lead to writes beyond the workspace.
    const int64_t own = p.seq_lens[seq] - p.query_start[seq + 1] + token, most = p.max_blocks * p.block_size;
    position = static_cast<int>(own < most ? own : most - 1);
    count = position < 0 ? 0 : position / p.block_size + 1;
  }
};

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
        numbers_(queries_ + max(group_ * 2 * p.head_dim, kDigits)),
        softmax_(numbers_ + 2 * kSelectWarps),
        found_(reinterpret_cast<int*>(softmax_ + 2 * group_)) {}

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
    const Limit limit = find_limit(chosen);
    if (threadIdx.x == 0) out[0] = blocks_[-kFirstPages];
    if (threadIdx.x < kLastPages) out[kFirstPages + chosen + threadIdx.x] = blocks_[count_ + threadIdx.x];
    write(limit, out + kFirstPages);
  }

 private:
  // Pages with larger weights are chosen, and of those with this weight the first `equal` ones.
  struct Limit {
    uint32_t weight;  // its bits, which are in the order of the weights, as these are not negative
    int equal;
  };

  __device__ static int lane() {
    return static_cast<int>(threadIdx.x % kWarpSize);
  }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x / kWarpSize);
  }
  __device__ float* bounds_of(int head) const {
    return bounds_ + head * p_.max_blocks;
  }
  __device__ uint32_t weight_bits(int page) const {
    return __float_as_uint(bounds_[page]);
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

  // The weight of rank `chosen`, from its highest digit to the lowest by counting the pages that have each digit.
  __device__ Limit find_limit(int chosen) const {
    auto* const counts = reinterpret_cast<int*>(queries_);
    Limit limit{0, chosen};
    for (int shift = 24; shift >= 0; shift -= 8) {
      __syncthreads();
      if (threadIdx.x < kDigits) counts[threadIdx.x] = 0;
      __syncthreads();
      for_each_page([&](int page) {
        const uint32_t bits = weight_bits(page);
        const bool same = shift == 24 || (bits ^ limit.weight) >> (shift + 8) == 0;
        if (same) atomicAdd(counts + (bits >> shift) % kDigits, 1);
      });
      __syncthreads();
      if (warp() == 0) find_digit(counts, limit.equal);
      __syncthreads();
      limit.weight |= static_cast<uint32_t>(found_[0]) << shift;
      limit.equal -= found_[1];
    }
    return limit;
  }

  // The digit of the page of this rank in descending order, and the number of pages with larger ones. One warp.
  __device__ void find_digit(const int* counts, int rank) const {
    constexpr int kOwn = kDigits / kWarpSize;
    const int* const own = counts + kDigits - kOwn * (lane() + 1);
    int end = 0;
    for (int i = 0; i < kOwn; ++i) end += own[i];
    int above = -end;
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (lane() >= step) end += other;
    }
    above += end;
    if (above >= rank || end < rank) return;
    int i = kOwn - 1;
    for (; above + own[i] < rank; --i) above += own[i];
    found_[0] = static_cast<int>(own - counts) + i;
    found_[1] = above;
  }

  // A chosen page's place is the number of chosen ones before it.
  __device__ void write(const Limit& limit, int32_t* out) const {
    auto* const larger_of = reinterpret_cast<int*>(numbers_);
    auto* const equal_of = larger_of + kSelectWarps;
    const unsigned below = (1u << lane()) - 1;
    int larger = 0, equal = 0;  // pages before this round's
    for (int first = 0; first < count_; first += static_cast<int>(blockDim.x)) {
      const int page = first + static_cast<int>(threadIdx.x);
      const uint32_t bits = page < count_ ? weight_bits(page) : 0;
      const bool is_larger = page < count_ && bits > limit.weight, is_equal = page < count_ && bits == limit.weight;
      const unsigned larger_lanes = __ballot_sync(kFullMask, is_larger);
      const unsigned equal_lanes = __ballot_sync(kFullMask, is_equal);
      __syncthreads();
      if (lane() == 0) larger_of[warp()] = __popc(larger_lanes), equal_of[warp()] = __popc(equal_lanes);
      __syncthreads();
      int larger_before = larger + __popc(larger_lanes & below), equal_before = equal + __popc(equal_lanes & below);
      for (int i = 0; i < kSelectWarps; ++i) {
        if (i < warp()) larger_before += larger_of[i], equal_before += equal_of[i];
        larger += larger_of[i], equal += equal_of[i];
      }
      if (is_larger || (is_equal && equal_before < limit.equal)) {
        out[larger_before + min(equal_before, limit.equal)] = blocks_[page];
      }
    }
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
  int* found_;  // a digit and a number
};

template <class T, int kOwn>
__global__ void __launch_bounds__(kSelectThreads, kSelectBlocks)
    select_pages_kernel(const __grid_constant__ SelectPagesParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x / p.kv_heads;
  const SeenPages seen(p, token);
  int32_t* const out = p.pages + static_cast<int64_t>(blockIdx.x) * p.width;
  const int pages = min(seen.count, p.width);
  if (blockIdx.x % p.kv_heads == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    p.lens[token] = max(seen.position + 1 - (seen.count - pages) * p.block_size, 0);
  }
  if (seen.count > p.width) {
    const PageSelection selection(p, seen.blocks, seen.count);
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
