// The recurrence of Mamba-2 on the GPU. A block has 32 columns of one head's state, which do not depend on the others,
// and a warp 32 of their rows, in registers: a decode step reads and writes the state once, and a prompt's tokens find
// it there. The warps' parts of a few tokens' outputs are added up at once. The norm needs all heads of a group: a
// kernel of its own, whose input stays in the L2.
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

constexpr int kMostWarps = kLargestScanDim / kScanRows;
static_assert(kScanColumns == kPartColumns && kScanRows == kPartRows);

// The shared memory of a block; rows of b and c are as long as all warps' rows together.
struct Prepared {
  float* b;        // [kScanTokens, rows]
  float* c;        // [kScanTokens, rows]
  float* x;        // [kScanTokens, kScanColumns]
  float* outputs;  // [kScanTokens, warps, kScanColumns]
  float* decay;    // [kScanTokens]
  float* dt;       // [kScanTokens]
  int rows;

  __device__ explicit Prepared(int warps) : rows(warps * kScanRows) {
    b = reinterpret_cast<float*>(dynamic_shared());
    c = b + kScanTokens * rows;
    x = c + kScanTokens * rows;
    outputs = x + kScanTokens * kScanColumns;
    decay = outputs + kScanTokens * warps * kScanColumns;
    dt = decay + kScanTokens;
  }
};

// A warp prepares one token, the i-th of those in shared memory.
template <class T>
__device__ void prepare(const Mamba2ScanParams& p, const Prepared& shared, int64_t head, int64_t column, int64_t token,
                        int i) {
  const int lane = threadIdx.x % kWarpSize;
  const T* const row = static_cast<const T*>(p.xbc) + token * p.xbc_stride;
  const T* const b = row + p.heads * p.head_dim + head / (p.heads / p.groups) * p.state_dim;
  const T* const c = b + p.groups * p.state_dim;
  for (int at = lane; at < shared.rows; at += kWarpSize) {
    shared.b[i * shared.rows + at] = at < p.state_dim ? to_float(b[at]) : 0.0f;
    shared.c[i * shared.rows + at] = at < p.state_dim ? to_float(c[at]) : 0.0f;
  }
  shared.x[i * kScanColumns + lane] = column < p.head_dim ? to_float(row[head * p.head_dim + column]) : 0.0f;
  if (lane != 0) return;
  const float step = load_float_or<T>(p.dt, p.dt_dtype, token * p.dt_stride + head) + p.dt_bias[head];
  const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
  float dt = softplus < p.dt_min ? p.dt_min : softplus;  // NaN stays
  dt = dt > p.dt_max ? p.dt_max : dt;
  shared.decay[i] = expf(-expf(p.a_log[head]) * dt);
  shared.dt[i] = dt;
}

template <class T>
__global__ void __launch_bounds__(kMostWarps* kWarpSize) mamba2_scan_kernel(Mamba2ScanParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int row = warp * kScanRows + lane / kLanesOfRow * kLaneRows, lane_column = lane % kLanesOfRow * kLaneColumns;
  const int64_t column_blocks = (p.head_dim + kScanColumns - 1) / kScanColumns;
  const int64_t first_column = blockIdx.x % column_blocks * kScanColumns;
  const int64_t head = blockIdx.x / column_blocks % p.heads, seq = blockIdx.x / column_blocks / p.heads;
  const int64_t begin = p.slots.query_start[seq], end = p.slots.query_start[seq + 1];
  if (begin >= end) return;
  // The states as vectors, by whose indices the compiler knows that it may store 16 bytes at once.
  const int64_t row_vectors = p.head_dim / kLaneColumns, slot_vectors = p.slots.stride / kLaneColumns;
  Four* const states = reinterpret_cast<Four*>(p.state) + (head * p.state_dim + row) * row_vectors +
                       (first_column + lane_column) / kLaneColumns;
  const bool in_state = row < p.state_dim && first_column + lane_column < p.head_dim;  // with all rows and columns
  const auto exists = [&](int32_t slot) { return slot >= 0 && slot < p.slots.slots; };

  StatePart part;
  if (const int32_t read = p.slots.reads[seq]; in_state && exists(read)) {
    const Four* const from = states + read * slot_vectors;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) part.s[r] = from[r * row_vectors];
  }

  const Prepared shared(warps);
  const float d = p.d[head];
  for (int64_t first = begin; first < end; first += kScanTokens) {
    const int tokens = static_cast<int>(min(end - first, int64_t{kScanTokens}));
    __syncthreads();  // the tokens before have been read
    for (int i = warp; i < tokens; i += warps) prepare<T>(p, shared, head, first_column + lane, first + i, i);
    __syncthreads();
    for (int i = 0; i < tokens; ++i) {
      float b[kLaneRows], c[kLaneRows];
      load_floats(shared.b + i * shared.rows + row, b);
      load_floats(shared.c + i * shared.rows + row, c);
      Four value = load_vector<kLaneColumns>(shared.x + i * kScanColumns + lane_column);
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) value.values[j] *= shared.dt[i];
      part.update(shared.decay[i], b, value);
      const Four output = part.dot(c);
      if (lane < kLanesOfRow) store_vector(shared.outputs + (i * warps + warp) * kScanColumns + lane_column, output);
      const int32_t write = p.slots.writes[first + i];
      if (!in_state || !exists(write)) continue;
      Four* const to = states + write * slot_vectors;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) to[r * row_vectors] = part.s[r];
    }
    __syncthreads();
    for (int i = warp; i < tokens; i += warps) {
      const int64_t column = first_column + lane, token = first + i, at = head * p.head_dim + column;
      if (column >= p.head_dim) continue;
      float y = shared.x[i * kScanColumns + lane] * d;
      for (int w = 0; w < warps; ++w) y += shared.outputs[(i * warps + w) * kScanColumns + lane];
      const float gate = to_float(static_cast<const T*>(p.z)[token * p.z_stride + at]);
      y *= gate / (1.0f + expf(-gate));
      const int64_t out = token * p.heads * p.head_dim + at;
      if (p.norm_weight != nullptr) {
        p.outputs[out] = y;
      } else {
        static_cast<T*>(p.out)[out] = from_float<T>(y);
      }
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
  const auto plan = plan_mamba2_scan(p.slots.seqs, p.tokens, p.heads, p.groups, p.state_dim, p.head_dim);
  if (plan.scan.grid == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    launch("mamba2_scan", mamba2_scan_kernel<T>, plan.scan, stream, p);
    if (p.norm_weight != nullptr && p.tokens > 0) launch("scan_norm", scan_norm_kernel<T>, plan.norm, stream, p);
  });
}

}  // namespace fastinfer::cuda
