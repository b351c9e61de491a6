// The recurrence of Mamba-2 on the GPU. A warp has a few columns of one head's state, which do not depend on the
// others, in registers: a decode step reads and writes the state once, and a prompt's tokens find it there. Warps wait
// for each other only when the next tokens' inputs are prepared. The norm needs all heads of a group: a kernel of its
// own, whose input stays in the L2.
#include "linear_attention/mamba2_scan.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"
#include "linear_attention/mamba2_scan_plan.h"
#include "linear_attention/state_part_cuda.h"

namespace fastinfer::cuda {
namespace {

// What a block prepares of some tokens, in shared memory. Rows are padded, so that tokens which a warp prepares lie in
// different banks.
template <int kRows>
struct Prepared {
  static constexpr int kLanes = scan_lanes(kRows), kTokens = scan_tokens(kRows);
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
  for (int j = 0; j < kScanElements / 8; ++j) {
    const int at = (j * kLanes + lane) * 8;
    float b_part[8] = {}, c_part[8] = {};
    if (at < p.state_dim) {
      load_eight(b + at, aligned, b_part);
      load_eight(c + at, aligned, c_part);
    }
    store_eight(b_part, &shared.b[i][at]);
    store_eight(c_part, &shared.c[i][at]);
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

// The first four warps have the state. With kAhead four more prepare the next tokens meanwhile; without it the same
// ones do, and more blocks find room.
template <class T, int kRows, bool kAhead>
__global__ void __launch_bounds__(kAhead ? 2 * kScanThreads : kScanThreads, kAhead ? 2 : 4)
    mamba2_scan_kernel(Mamba2ScanParams p) {
  using Part = StatePart<kRows>;
  constexpr int kTokens = Prepared<kRows>::kTokens;
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t column_blocks = (p.head_dim + Part::kBlockColumns - 1) / Part::kBlockColumns;
  const int64_t first_column = blockIdx.x % column_blocks * Part::kBlockColumns;
  const int64_t head = blockIdx.x / column_blocks % p.heads, seq = blockIdx.x / column_blocks / p.heads;
  const int64_t begin = p.slots.query_start[seq], end = p.slots.query_start[seq + 1];
  const int32_t read = p.slots.reads[seq];
  if (begin >= end) return;
  const int rows = static_cast<int>(p.state_dim), column = Part::first_column(),
            summed = column + Part::summed_column();
  const int preparing = static_cast<int>(threadIdx.x) - (kAhead ? kScanThreads : 0);
  const bool in_state = threadIdx.x < kScanThreads && first_column + column < p.head_dim;
  const int64_t row_vectors = p.head_dim / kLaneColumns, slot_vectors = p.slots.stride / kLaneColumns;
  LaneColumns* const states = reinterpret_cast<LaneColumns*>(p.state) + head * p.state_dim * row_vectors +
                              (first_column + column) / kLaneColumns;
  int64_t output = (begin * p.heads + head) * p.head_dim + first_column + summed;
  const auto exists = [&](int32_t slot) { return slot >= 0 && slot < p.slots.slots; };

  Part part;
  if (in_state && exists(read)) part.load(states + read * slot_vectors, row_vectors, rows);
  auto* const prepared = reinterpret_cast<Prepared<kRows>*>(dynamic_shared());  // one; with kAhead two, in turns
  int turn = 0;
  const auto prepare_at = [&](Prepared<kRows>& tokens, int64_t first) {
    if (preparing >= 0 && first < end) prepare<T>(p, tokens, preparing, head, first_column, first, end);
  };
  const float d = p.d[head];
  prepare_at(prepared[0], begin);
  for (int64_t first = begin; first < end; first += kTokens) {
    __syncthreads();
    if constexpr (kAhead) prepare_at(prepared[turn ^ 1], first + kTokens);
    const Prepared<kRows>& shared = prepared[turn];
    if (in_state) {
      const int tokens = static_cast<int>(min(end - first, int64_t{kTokens}));
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
        if (exists(write)) part.store(states + write * slot_vectors, row_vectors, rows);
      }
    }
    if constexpr (kAhead) {
      turn ^= 1;
    } else {
      __syncthreads();  // these have been read
      prepare_at(prepared[0], first + kTokens);
    }
  }
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
  if (plan.scan.grid == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto choose = [&]<int kRows>() {
      return plan.ahead ? mamba2_scan_kernel<T, kRows, true> : mamba2_scan_kernel<T, kRows, false>;
    };
    const auto kernel = plan.rows == 128 ? choose.template operator()<128>() : choose.template operator()<256>();
    launch("mamba2_scan", kernel, plan.scan, stream, p);
    if (p.norm_weight != nullptr && p.tokens > 0) launch("scan_norm", scan_norm_kernel<T>, plan.norm, stream, p);
  });
}

}  // namespace fastinfer::cuda
