#include "attention/store_kv_cache_cpu.h"
#include "common/cpu/parallel.h"
#include "norm/rms_norm_cpu.h"
#include "rotary/norm_rotary_store.h"
#include "rotary/rotary_embedding_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Norm and rotation of one head in fp32.
template <class T>
void prepare_head(const NormRotaryStoreParams& p, const T* x, const void* weight, int64_t token, float* out) {
  const int head_dim = p.cache.head_dim;
  if (weight != nullptr) {
    dispatch(p.weight_dtype, [&]<class W>(W) { rms_norm_row(x, static_cast<const W*>(weight), head_dim, p.eps, out); });
  } else {
    for_each_vector(head_dim, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(x + i, lanes), lanes); });
  }
  rotate_head(out, p.cos_sin_cache + p.positions[token] * p.rotary_dim, p.rotary_dim, p.interleaved);
}

}  // namespace

void norm_rotary_store(const NormRotaryStoreParams& p) {
  const KvCacheSlots& cache = p.cache;
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      float* prepared = scratch_array<float>(0, cache.head_dim);
      for (int64_t token = begin; token < end; ++token) {
        T* q = static_cast<T*>(p.q) + token * p.q_stride;
        const float scale = p.query_scales == nullptr ? 1.0f : p.query_scales[p.positions[token]];
        for (int head = 0; head < p.q_heads; ++head, q += cache.head_dim) {
          prepare_head(p, q, p.q_norm_weight, token, prepared);
          for_each_vector(cache.head_dim, [&](int64_t i, int64_t lanes) {
            store_lanes(q + i, load_lanes(prepared + i, lanes) * scale, lanes);
          });
        }
        const int64_t slot = cache.slot_mapping[token];
        if (slot < 0) continue;
        const T* k = static_cast<const T*>(p.k) + token * p.k_stride;
        const T* v = static_cast<const T*>(p.v) + token * p.v_stride;
        for (int head = 0; head < cache.heads; ++head, k += cache.head_dim, v += cache.head_dim) {
          prepare_head(p, k, p.k_norm_weight, token, prepared);
          store_head<kInt4KeyGroup>(cache, prepared, cache.k, cache.k_scale, slot, head);
          if (p.norm_v) {
            rms_norm_row(v, static_cast<const float*>(nullptr), cache.head_dim, p.eps, prepared);
            store_head<kInt4ValueGroup>(cache, prepared, cache.v, cache.v_scale, slot, head);
          } else {
            store_head<kInt4ValueGroup>(cache, v, cache.v, cache.v_scale, slot, head);
          }
        }
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
