// The prologue of decode on the GPU. A group of lanes takes one head of q, k or v of one token; between norm and
// rotation the head waits in shared memory, as a rotation needs elements that other lanes have loaded.
#include "rotary/norm_rotary_store.h"

#include "attention/store_kv_cache_cuda.h"
#include "attention/store_kv_cache_plan.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {
namespace {

// Norm and rotation in fp32, from global to shared memory. All lanes of the warp must call it; with head_dim 0 a group
// reads nothing.
template <class T, int kCount>
__device__ void prepare_head(const LaneGroup& group, const NormRotaryStoreParams& p, const T* x, int head_dim,
                             const void* weight, bool unweighted, int64_t position, float* out) {
  float squares = 0.0f;
  for (int i = group.rank * kCount; i < head_dim; i += group.lanes * kCount) {
    float values[kCount];
    load_floats(x + i, values);
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
    store_values(out + i, values);
  }
  squares = group.sum(squares);
  if (weight != nullptr || unweighted) {
    const float scale = rsqrtf(squares / static_cast<float>(head_dim) + p.eps);
    for (int i = group.rank * kCount; i < head_dim; i += group.lanes * kCount) {
      float values[kCount], weights[kCount];
      load_floats(out + i, values);
      if (unweighted) {
        for (int j = 0; j < kCount; ++j) weights[j] = 1.0f;
      } else if (p.weight_dtype == DType::kFloat32) {
        load_floats(static_cast<const float*>(weight) + i, weights);
      } else {
        load_floats(static_cast<const T*>(weight) + i, weights);
      }
      for (int j = 0; j < kCount; ++j) values[j] *= scale * weights[j];
      store_values(out + i, values);
    }
  }
  __syncwarp();
  if (position < p.max_position && position >= 0) {  // the host cannot check without waiting for the device
    const int half = p.rotary_dim / 2;
    const float* cos = p.cos_sin_cache + position * p.rotary_dim;
    const float* sin = cos + half;
    for (int i = group.rank; i < half; i += group.lanes) {
      float& first = out[p.interleaved ? 2 * i : i];
      float& second = out[p.interleaved ? 2 * i + 1 : i + half];
      const float a = first, b = second;
      first = a * cos[i] - b * sin[i];
      second = b * cos[i] + a * sin[i];
    }
  }
  __syncwarp();
}

template <class T, int kCount>
__device__ void store_query(const LaneGroup& group, const NormRotaryStoreParams& p, const float* prepared,
                            int64_t position, T* out) {
  const bool scaled = p.query_scales != nullptr && position >= 0 && position < p.max_position;
  const float scale = scaled ? p.query_scales[position] : 1.0f;
  for (int i = group.rank * kCount; i < p.cache.head_dim; i += group.lanes * kCount) {
    float values[kCount];
    load_floats(prepared + i, values);
    for (int j = 0; j < kCount; ++j) values[j] *= scale;
    store_values(out + i, values);
  }
}

template <class T, int kCount>
__global__ void norm_rotary_store_kernel(NormRotaryStoreParams p, int lanes) {
  grid_dependency_wait();
  grid_dependency_launch();
  const LaneGroup group(lanes);
  const KvCacheSlots& cache = p.cache;
  const int64_t token = blockIdx.x, head_dim = cache.head_dim;
  const int local = threadIdx.x / lanes, heads = p.q_heads + 2 * cache.heads;
  const int index = blockIdx.y * (blockDim.x / lanes) + local;
  const bool valid = index < heads;
  const int head = valid ? index : 0;  // groups without a head keep the warp's others company
  const bool is_query = head < p.q_heads, is_key = !is_query && head < p.q_heads + cache.heads;
  T* const q = static_cast<T*>(p.q) + token * p.q_stride + head * head_dim;
  const int kv_head = is_query ? 0 : (head - p.q_heads) % max(cache.heads, 1);
  const T* const k = static_cast<const T*>(p.k) + token * p.k_stride + kv_head * head_dim;
  const T* const v = static_cast<const T*>(p.v) + token * p.v_stride + kv_head * head_dim;

  // Values need neither norm nor rotation, but the warp stays together.
  float* const prepared = reinterpret_cast<float*>(dynamic_shared()) + local * head_stride(cache.head_dim);
  const bool is_value = !is_query && !is_key;
  const void* const weight = is_query ? p.q_norm_weight : is_key ? p.k_norm_weight : nullptr;
  prepare_head<T, kCount>(group, p,
                          is_query ? q
                          : is_key ? k
                                   : v,
                          valid ? cache.head_dim : 0, weight, is_value && p.norm_v, is_value ? -1 : p.positions[token],
                          prepared);
  if (valid && is_query) store_query<T, kCount>(group, p, prepared, p.positions[token], q);
  store_head<kCount>(group, cache, prepared, is_key ? cache.k : cache.v, is_key ? cache.k_scale : cache.v_scale,
                     valid && !is_query ? slot_of(cache, token) : -1, kv_head,
                     is_key ? kInt4KeyGroup : kInt4ValueGroup);
}

}  // namespace

void norm_rotary_store(const NormRotaryStoreParams& p, void* stream) {
  const KvCacheSlots& cache = p.cache;
  const int heads = p.q_heads + 2 * cache.heads;
  if (heads == 0 || cache.head_dim == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = cache.head_dim % kVector == 0 && p.q_stride % kVector == 0 && p.k_stride % kVector == 0 &&
                            p.v_stride % kVector == 0 &&
                            vector_aligned(p.q, p.k, p.v, p.q_norm_weight, p.k_norm_weight, cache.k, cache.v);
    const size_t shared_bytes = head_stride(cache.head_dim) * sizeof(float);
    const HeadPlan plan = plan_heads(p.tokens, heads, cache.head_dim, vectorised ? kVector : 1, shared_bytes);
    const auto kernel = vectorised ? norm_rotary_store_kernel<T, kVector> : norm_rotary_store_kernel<T, 1>;
    launch("norm_rotary_store", kernel, plan.launch, stream, p, plan.lanes);
  });
}

}  // namespace fastinfer::cuda
