// A warp per token chooses its experts. The last block to be done then sorts the rows of all tokens by expert: it
// counts, and keeps the order of an expert's rows, so that the result does not depend on which block was the last.
#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "moe/route_experts.h"

namespace fastinfer::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * kWarpSize;  // tokens per block, and parts that are sorted side by side

__device__ inline unsigned long long largest_key(unsigned long long key) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(kFullMask, key, offset));
  return key;
}

// A lane holds the keys of kSlots experts, 32 apart.
template <class T, int kSlots>
__device__ void choose_experts(const RouteExpertsParams& p, int64_t token) {
  const int lane = threadIdx.x % kWarpSize;
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_stride;
  unsigned long long keys[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int expert = lane + i * kWarpSize;
    keys[i] = expert < p.experts ? expert_key(to_float(logits[expert]), expert) : 0;
  }
  const auto best = [&] {
    unsigned long long key = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) key = max(key, keys[i]);
    return largest_key(key);
  };
  float largest = 0.0f, total = 0.0f;
  if (!p.sigmoid) {
    largest = logit_of(best());
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (keys[i] != 0) total += expf(logit_of(keys[i]) - largest);
    }
    total = warp_sum(total);
  }
  const auto score = [&](float logit) {
    return p.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest) / total;
  };
  const bool by_score = ordered_by_score(p);
  if (by_score) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int expert = lane + i * kWarpSize;
      if (expert >= p.experts) continue;
      const float logit = logit_of(keys[i]);
      keys[i] =
          expert_key((p.biased_logits ? logit : score(logit)) + (p.bias != nullptr ? p.bias[expert] : 0.0f), expert);
    }
  }
  if (p.num_groups > 1) {
    // A group is as good as its two best experts together. Lane g holds the key of group g.
    const int size = p.experts / p.num_groups;
    const auto best_of = [&](int group, unsigned long long below) {
      unsigned long long key = 0;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const int place = lane + i * kWarpSize - group * size;
        if (place >= 0 && place < size && keys[i] < below) key = max(key, keys[i]);
      }
      return largest_key(key);
    };
    unsigned long long group_key = 0;
    for (int group = 0; group < p.num_groups; ++group) {
      const unsigned long long first = best_of(group, ~0ull), second = best_of(group, first);
      if (lane == group) group_key = expert_key(logit_of(first) + logit_of(second), group);
    }
    unsigned kept = 0;
    for (int i = 0; i < p.top_groups; ++i) {
      const unsigned long long key = largest_key(group_key);
      kept |= 1u << expert_of(key);
      if (group_key == key) group_key = 0;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int group = (lane + i * kWarpSize) / size;
      if (group < p.num_groups && (kept >> group & 1) == 0) keys[i] = 0;
    }
  }
  float chosen = 0.0f, weight = 0.0f;  // the weight and the id of this lane are written at the end
  int id = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const unsigned long long key = best();
    const int expert = expert_of(key);
    float own = 0.0f;
    if (p.sparse) {  // among the experts that are left, of which this one has the largest logit
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const float logit = logit_of(keys[i]);
        if (keys[i] != 0 && takes_part(logit, logit_of(key), p.tolerance)) own += expf(logit - logit_of(key));
      }
      own = 1.0f / warp_sum(own);
    } else {
      own = score(by_score ? to_float(logits[expert]) : logit_of(key));
    }
    chosen += own;
    if (lane == k) {
      weight = own;
      id = expert;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) keys[i] = keys[i] == key ? 0 : keys[i];
  }
  if (lane >= p.top_k) return;
  weight = weight / (p.renormalize ? chosen + kLeastScore : 1.0f) * p.scale;
  if (p.expert_scale != nullptr) weight *= p.expert_scale[id];
  p.expert_weights[token * p.top_k + lane] = weight;
  p.expert_ids[token * p.top_k + lane] = id;
}

// Sorts rows in the block's shared memory: [kWarps, experts] numbers, then one per warp.
struct RowSorter {
  const RouteExpertsParams& p;
  int* const counts;  // of a warp's part: an expert's rows, then the place of the next one
  const int lane, warp, rows, part_begin, part_end;
  const int bits;  // of an expert's index

  __device__ RowSorter(const RouteExpertsParams& p, int* counts)
      : p(p),
        counts(counts),
        lane(threadIdx.x % kWarpSize),
        warp(threadIdx.x / kWarpSize),
        rows(static_cast<int>(p.tokens) * p.top_k),
        part_begin(min(warp * part_rows(), rows)),
        part_end(min(part_begin + part_rows(), rows)),
        bits(bits_of(p.experts - 1)) {}

  // In a function, because nvcc leaves initialisers of members to the host's compiler, too.
  __device__ static int bits_of(int number) {
    return kWarpSize - __clz(number);
  }

  __device__ void sort() const {
    for (int i = threadIdx.x; i < kWarps * p.experts; i += kThreads) counts[i] = 0;
    __syncthreads();
    int* const own = counts + warp * p.experts;
    each_group([&](int /*row*/, int expert, unsigned same) {
      if (is_first(same)) own[expert] += __popc(same);
      __syncwarp();
    });
    __syncthreads();
    counts_to_places();
    __syncthreads();
    each_group([&](int row, int expert, unsigned same) {
      if (same != 0) p.row_ids[own[expert] + __popc(same & ((1u << lane) - 1))] = row;
      __syncwarp();
      if (is_first(same)) own[expert] += __popc(same);
      __syncwarp();
    });
  }

 private:
  __device__ int part_rows() const {
    return (rows + kThreads - 1) / kThreads * kWarpSize;
  }

  __device__ bool is_first(unsigned same) const {
    return same != 0 && __ffs(static_cast<int>(same)) - 1 == lane;
  }

  // Calls fn(row, expert, the lanes with rows of the same expert) for the warp's part, a row per lane; lanes without a
  // row get 0 lanes.
  template <class Fn>
  __device__ void each_group(Fn&& fn) const {
    for (int first = part_begin; first < part_end; first += kWarpSize) {
      const int row = first + lane;
      const bool exists = row < part_end;
      const int expert = exists ? __ldcg(p.expert_ids + row) : 0;
      unsigned same = __ballot_sync(kFullMask, exists);
      for (int bit = 0; bit < bits; ++bit) {
        const bool set = (expert >> bit & 1) != 0;
        const unsigned votes = __ballot_sync(kFullMask, set);
        same &= set ? votes : ~votes;
      }
      fn(row, expert, exists ? same : 0u);
    }
  }

  // Replaces each count by the sum of those before it, expert by expert and within an expert part by part.
  __device__ void counts_to_places() const {
    int* const warp_sums = counts + kWarps * p.experts;
    const int run = (p.experts + kThreads - 1) / kThreads, thread = threadIdx.x;
    const int begin = min(thread * run, p.experts), end = min(begin + run, p.experts);
    int own = 0;
    for (int expert = begin; expert < end; ++expert) {
      for (int part = 0; part < kWarps; ++part) own += counts[part * p.experts + expert];
    }
    int place = own;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, place, offset);
      if (lane >= offset) place += other;
    }
    if (lane == kWarpSize - 1) warp_sums[warp] = place;
    __syncthreads();
    place -= own;
    for (int i = 0; i < warp; ++i) place += warp_sums[i];
    for (int expert = begin; expert < end; ++expert) {
      p.expert_start[expert] = place;
      for (int part = 0; part < kWarps; ++part) {
        int& count = counts[part * p.experts + expert];
        const int next = place + count;
        count = place;
        place = next;
      }
    }
    if (thread == 0) p.expert_start[p.experts] = rows;
  }
};

template <class T, int kSlots>
__global__ void __launch_bounds__(kThreads) route_experts_kernel(RouteExpertsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (token < p.tokens) choose_experts<T, kSlots>(p, token);
  if (last_to_arrive(p.arrived, static_cast<int>(gridDim.x))) {
    RowSorter(p, reinterpret_cast<int*>(dynamic_shared())).sort();
  }
}

}  // namespace

void route_experts(const RouteExpertsParams& p, void* stream) {
  const int64_t blocks = (p.tokens + kWarps - 1) / kWarps;
  const LaunchConfig config{.grid = blocks > 0 ? blocks : 1,  // without tokens every expert has no rows
                            .block = kThreads,
                            .shared_bytes = kWarps * (static_cast<size_t>(p.experts) + 1) * sizeof(int),
                            .dependent = true};
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto kernel = p.experts <= 128   ? route_experts_kernel<T, 4>
                        : p.experts <= 256 ? route_experts_kernel<T, 8>
                                           : route_experts_kernel<T, 32>;
    launch("route_experts", kernel, config, stream, p);
  });
}

}  // namespace fastinfer::cuda
