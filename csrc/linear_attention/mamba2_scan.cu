// The recurrence of Mamba-2 on the GPU. A warp has a few columns of one head's state, which do not depend on the
// others, in registers: a decode step reads and writes the state once, and a prompt's tokens find it there. Warps wait
// for each other only when the next tokens' inputs are prepared. The norm needs all heads of a group: a kernel of its
// own, whose input stays in the L2.
#include "linear_attention/mamba2_scan.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "linear_attention/mamba2_scan_plan.h"
#include "linear_attention/state_block_cuda.h"

namespace fastinfer::cuda {
namespace {

// What a block prepares of some tokens, in shared memory. Rows are padded, so that tokens which a warp prepares lie in
// different banks.
template <int kRows>
struct Prepared {
  static constexpr int kLanes = preparing_lanes(kRows), kTokens = prepared_tokens(kRows);
  static constexpr int kColumns = StatePart<kRows>::kBlockColumns;
  float b[kTokens][kRows + kLanes];
  float c[kTokens][kRows + kLanes];
  float x[kTokens][kColumns + kLanes];
  float gates[kTokens][kColumns + kLanes];  // silu(z)
  float decay[kTokens], dt[kTokens];
  int32_t writes[kTokens];
};

// Threads, numbered from 0, prepare the tokens from `first` on; a warp fills its places with the last one.
template <class T, int kRows>
__device__ void prepare(const Mamba2ScanParams& p, Prepared<kRows>& shared, int thread, int64_t head,
                        int64_t first_column, int64_t first, int64_t end) {
  constexpr int kLanes = Prepared<kRows>::kLanes;
  const int lane = thread % kLanes, i = thread / kLanes;
  if (first + thread / kWarpSize * (kWarpSize / kLanes) >= end) return;  // the whole warp
  const int64_t token = min(first + i, end - 1), column = head * p.head_dim + first_column;
  const T* const row = static_cast<const T*>(p.xbc) + token * p.xbc_stride;
  const T* const b = row + p.heads * p.head_dim + head / (p.heads / p.groups) * p.state_dim;
  const T* const c = b + p.groups * p.state_dim;
  const T* const z = static_cast<const T*>(p.z) + token * p.z_stride + column;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;  // as heads and groups have multiples of 16 elements
#pragma unroll
  for (int j = 0; j < kPreparedElements / 8; ++j) {
    const int at = (j * kLanes + lane) * 8;
    float b_part[8] = {}, c_part[8] = {};
    if (at < p.state_dim) {
      load_eight(b + at, aligned, b_part);
      load_eight(c + at, aligned, c_part);
    }
    store_values(&shared.b[i][at], b_part);
    store_values(&shared.c[i][at], c_part);
  }
#pragma unroll
  for (int at = lane; at < shared.kColumns; at += kLanes) {
    const bool exists = first_column + at < p.head_dim;
    const float gate = exists ? to_float(z[at]) : 0.0f;
    shared.x[i][at] = exists ? to_float(row[column + at]) : 0.0f;
    shared.gates[i][at] = gate / (1.0f + expf(-gate));
  }
  if (lane != 0) return;
  const float step = load_float_or<T>(p.dt, p.dt_dtype, token * p.dt_stride + head) + p.dt_bias[head];
  const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
  float dt = softplus < p.dt_min ? p.dt_min : softplus;  // NaN stays
  dt = dt > p.dt_max ? p.dt_max : dt;
  shared.decay[i] = expf(-expf(p.a_log[head]) * dt);
  shared.dt[i] = dt;
  shared.writes[i] = p.slots.writes[token];
}

template <class T, int kRows, bool kAhead>
__global__ void __launch_bounds__(kAhead ? 2 * kStateThreads : kStateThreads, kAhead ? 2 : 4)
    mamba2_scan_kernel(Mamba2ScanParams p) {
  using Part = StatePart<kRows>;
  grid_dependency_wait();
  grid_dependency_launch();
  const StateBlock<kRows> block(p.slots, p.state, p.heads, p.state_dim, p.head_dim);
  if (block.begin >= block.end) return;
  const int column = Part::first_column(), summed = column + Part::summed_column();
  int64_t output = (block.begin * p.heads + block.head) * p.head_dim + block.first_column + summed;
  const float d = p.d[block.head];
  Part part = block.load();
  const auto prepare_tokens = [&](Prepared<kRows>& shared, int thread, int64_t first) {
    prepare<T>(p, shared, thread, block.head, block.first_column, first, block.end);
  };
  block.template each_prepared<Prepared<kRows>, kAhead>(prepare_tokens, [&](const Prepared<kRows>& shared, int tokens) {
#pragma unroll 1
    for (int i = 0; i < tokens; ++i, output += p.heads * p.head_dim) {
      const int32_t write = shared.writes[i];
      LaneRows b, c;
      Part::load_rows(shared.b[i], b);
      Part::load_rows(shared.c[i], c);
      auto x = load_vector<kLaneColumns>(&shared.x[i][column]);
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) x.values[j] *= shared.dt[i];
      part.scale(shared.decay[i]);
      part.add(b, x);
      const float y = fmaf(shared.x[i][summed], d, Part::sum(part.dot(c))) * shared.gates[i][summed];
      if (Part::has_sum()) {
        if (p.norm_weight != nullptr) {
          p.outputs[output] = y;
        } else {
          static_cast<T*>(p.out)[output] = from_float<T>(y);
        }
      }
      block.store(part, write);
    }
  });
}

// A block normalises a token's group of heads.
template <class T>
__global__ void __launch_bounds__(kScanNormThreads) scan_norm_kernel(Mamba2ScanParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  float* const warp_sums = reinterpret_cast<float*>(dynamic_shared());
  const int64_t size = p.heads / p.groups * p.head_dim, group = blockIdx.x % p.groups;
  const float* const y = p.outputs + blockIdx.x * size;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < size; i += kScanNormThreads) squares += y[i] * y[i];
  const float scale = rsqrtf(block_sum(squares, warp_sums) / static_cast<float>(size) + p.eps);
  for (int64_t i = threadIdx.x; i < size; i += kScanNormThreads) {
    const float weight = load_float_or<T>(p.norm_weight, p.norm_weight_dtype, group * size + i);
    static_cast<T*>(p.out)[blockIdx.x * size + i] = from_float<T>(y[i] * scale * weight);
  }
}

}  // namespace

void mamba2_scan(const Mamba2ScanParams& p, void* stream) {
  const auto plan = plan_mamba2_scan(p.slots.seqs, p.tokens, p.heads, p.groups, p.state_dim, p.head_dim, p.device);
  if (plan.scan.launch.grid == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto choose = [&]<int kRows>() {
      return plan.scan.ahead ? mamba2_scan_kernel<T, kRows, true> : mamba2_scan_kernel<T, kRows, false>;
    };
    const auto kernel = plan.scan.rows == 128 ? choose.template operator()<128>() : choose.template operator()<256>();
    launch("mamba2_scan", kernel, plan.scan.launch, stream, p);
    if (p.norm_weight != nullptr && p.tokens > 0) launch("scan_norm", scan_norm_kernel<T>, plan.norm, stream, p);
  });
}

}  // namespace fastinfer::cuda
