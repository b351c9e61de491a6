// The gated delta rule on the GPU. A block has 32 columns of one head's state, which do not depend on the others, and a
// warp 32 of their rows, in registers: a decode step reads and writes the state once, and a prompt's tokens find it
// there. A token costs one barrier, at which the warps add up their parts of S^T k and S^T q. The norm needs all
// columns of a head: a kernel of its own, whose input stays in the L2.
#include "linear_attention/gated_delta_rule.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"
#include "linear_attention/gated_delta_rule_plan.h"
#include "linear_attention/state_part_cuda.h"

namespace fastinfer::cuda {
namespace {

constexpr int kMostWarps = kLargestDeltaHead / kDeltaRows;
static_assert(kDeltaColumns == kPartColumns && kDeltaRows == kPartRows);

// The shared memory of a block; rows of keys and queries are as long as all warps' rows together.
struct Prepared {
  float* keys;       // [kDeltaTokens, rows], of length 1
  float* queries;    // [kDeltaTokens, rows], of length 1 / sqrt(key_dim)
  float* values;     // [kDeltaTokens, kDeltaColumns]
  float* decay;      // [kDeltaTokens]
  float* beta;       // [kDeltaTokens]
  float* key_query;  // [kDeltaTokens]: k . q
  float* products;   // [2, warps, 2, kDeltaColumns]: of even and of odd tokens
  int rows;

  __device__ explicit Prepared(int warps) : rows(warps * kDeltaRows) {
    keys = reinterpret_cast<float*>(dynamic_shared());
    queries = keys + kDeltaTokens * rows;
    values = queries + kDeltaTokens * rows;
    products = values + kDeltaTokens * kDeltaColumns;
    decay = products + 4 * warps * kDeltaColumns;
    beta = decay + kDeltaTokens;
    key_query = beta + kDeltaTokens;
  }
};

// A warp prepares one token, the i-th of those in shared memory.
template <class T>
__device__ void prepare(const GatedDeltaRuleParams& p, const Prepared& shared, int64_t head, int64_t column,
                        int64_t token, int i) {
  const int lane = threadIdx.x % kWarpSize;
  const T* const row = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
  const T* const q = row + head / (p.value_heads / p.key_heads) * p.key_dim;
  const T* const k = q + p.key_heads * p.key_dim;
  float q_squares = 0.0f, k_squares = 0.0f, product = 0.0f, query[kMostWarps], key[kMostWarps];
#pragma unroll
  for (int j = 0; j < kMostWarps; ++j) {
    const int at = j * kWarpSize + lane;
    query[j] = at < p.key_dim ? to_float(q[at]) : 0.0f;
    key[j] = at < p.key_dim ? to_float(k[at]) : 0.0f;
    q_squares += query[j] * query[j];
    k_squares += key[j] * key[j];
  }
  const float q_scale = rsqrtf(warp_sum(q_squares) + kDeltaNormEps) * rsqrtf(static_cast<float>(p.key_dim));
  const float k_scale = rsqrtf(warp_sum(k_squares) + kDeltaNormEps);
#pragma unroll
  for (int j = 0; j < kMostWarps; ++j) {
    query[j] *= q_scale;
    key[j] *= k_scale;
    product += key[j] * query[j];
    if (const int at = j * kWarpSize + lane; at < shared.rows) {
      shared.queries[i * shared.rows + at] = query[j];
      shared.keys[i * shared.rows + at] = key[j];
    }
  }
  product = warp_sum(product);
  const T* const v = row + 2 * p.key_heads * p.key_dim + head * p.value_dim;
  shared.values[i * kDeltaColumns + lane] = column < p.value_dim ? to_float(v[column]) : 0.0f;
  if (lane != 0) return;
  const float step = load_float_or<T>(p.a, p.a_dtype, token * p.a_stride + head) + p.dt_bias[head];
  const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
  shared.decay[i] = expf(-expf(p.a_log[head]) * softplus);
  shared.beta[i] = 1.0f / (1.0f + expf(-load_float_or<T>(p.b, p.b_dtype, token * p.b_stride + head)));
  shared.key_query[i] = product;
}

template <class T>
__global__ void __launch_bounds__(kMostWarps* kWarpSize) gated_delta_rule_kernel(GatedDeltaRuleParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int row = warp * kDeltaRows + lane / kLanesOfRow * kLaneRows, lane_column = lane % kLanesOfRow * kLaneColumns;
  const int64_t column_blocks = (p.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const int64_t first_column = blockIdx.x % column_blocks * kDeltaColumns, column = first_column + lane_column;
  const int64_t head = blockIdx.x / column_blocks % p.value_heads, seq = blockIdx.x / column_blocks / p.value_heads;
  const int64_t begin = p.slots.query_start[seq], end = p.slots.query_start[seq + 1];
  if (begin >= end) return;
  // The states and outputs as vectors, by whose indices the compiler knows that it may store 16 bytes at once.
  const int64_t row_vectors = p.value_dim / kLaneColumns, slot_vectors = p.slots.stride / kLaneColumns;
  Four* const states =
      reinterpret_cast<Four*>(p.state) + (head * p.key_dim + row) * row_vectors + column / kLaneColumns;
  Four* const outputs = reinterpret_cast<Four*>(p.outputs) + head * row_vectors + column / kLaneColumns;
  const bool in_state = row < p.key_dim && column < p.value_dim;  // with all its rows and columns
  const auto exists = [&](int32_t slot) { return slot >= 0 && slot < p.slots.slots; };

  StatePart part;
  if (const int32_t read = p.slots.reads[seq]; in_state && exists(read)) {
    const Four* const from = states + read * slot_vectors;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) part.s[r] = from[r * row_vectors];
  }

  const Prepared shared(warps);
  for (int64_t first = begin; first < end; first += kDeltaTokens) {
    const int tokens = static_cast<int>(min(end - first, int64_t{kDeltaTokens}));
    __syncthreads();  // the tokens before have been read
    for (int i = warp; i < tokens; i += warps) prepare<T>(p, shared, head, first_column + lane, first + i, i);
    __syncthreads();
    for (int i = 0; i < tokens; ++i) {
      float key[kLaneRows], query[kLaneRows];
      load_floats(shared.keys + i * shared.rows + row, key);
      load_floats(shared.queries + i * shared.rows + row, query);
      const Four key_part = part.dot(key), query_part = part.dot(query);
      float* const products = shared.products + i % 2 * warps * 2 * kDeltaColumns + lane_column;
      if (lane < kLanesOfRow) {
        store_vector(products + 2 * warp * kDeltaColumns, key_part);
        store_vector(products + (2 * warp + 1) * kDeltaColumns, query_part);
      }
      __syncthreads();
      const float decay = shared.decay[i], beta = shared.beta[i], key_query = shared.key_query[i];
      const Four value = load_vector<kLaneColumns>(shared.values + i * kDeltaColumns + lane_column);
      Four key_sum{}, query_sum{}, d, o;
      for (int w = 0; w < warps; ++w) {
        const Four k = load_vector<kLaneColumns>(products + 2 * w * kDeltaColumns);
        const Four q = load_vector<kLaneColumns>(products + (2 * w + 1) * kDeltaColumns);
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          key_sum.values[c] += k.values[c];
          query_sum.values[c] += q.values[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        d.values[c] = beta * fmaf(-decay, key_sum.values[c], value.values[c]);
        o.values[c] = fmaf(d.values[c], key_query, decay * query_sum.values[c]);
      }
      part.update(decay, key, d);
      if (threadIdx.x < kLanesOfRow && column < p.value_dim) {
        outputs[(first + i) * p.value_heads * row_vectors] = o;
      }
      const int32_t write = p.slots.writes[first + i];
      if (!in_state || !exists(write)) continue;
      Four* const to = states + write * slot_vectors;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) to[r * row_vectors] = part.s[r];
    }
  }
}

// A warp normalises the outputs of one head.
template <class T>
__global__ void __launch_bounds__(kDeltaNorms* kWarpSize) gated_norm_kernel(GatedDeltaRuleParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDeltaNorms + threadIdx.x / kWarpSize;
  const int64_t token = i / p.value_heads, head = i % p.value_heads;
  if (token >= p.tokens) return;
  constexpr int kHeld = kLargestDeltaHead / kWarpSize;
  float o[kHeld], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = j * kWarpSize + lane;
    o[j] = at < p.value_dim ? p.outputs[i * p.value_dim + at] : 0.0f;
    squares += o[j] * o[j];
  }
  const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(p.value_dim) + p.eps);
  const T* const z = static_cast<const T*>(p.z) + token * p.z_stride + head * p.value_dim;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = j * kWarpSize + lane;
    if (at >= p.value_dim) break;
    const float gate = to_float(z[at]), weight = load_float_or<T>(p.norm_weight, p.norm_weight_dtype, at);
    static_cast<T*>(p.out)[i * p.value_dim + at] = from_float<T>(o[j] * scale * weight * (gate / (1.0f + expf(-gate))));
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRuleParams& p, void* stream) {
  const auto plan = plan_gated_delta_rule(p.slots.seqs, p.tokens, p.value_heads, p.key_dim, p.value_dim);
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    launch("gated_delta_rule", gated_delta_rule_kernel<T>, plan.rule, stream, p);
    launch("gated_norm", gated_norm_kernel<T>, plan.norm, stream, p);
  });
}

}  // namespace fastinfer::cuda
