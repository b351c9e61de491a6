#include "rotary/latent_rotary_store.h"

#include "attention/store_kv_cache_cpu.h"
#include "common/cpu/parallel.h"
#include "norm/rms_norm_cpu.h"
#include "rotary/rotary_embedding_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class T>
void join_query(const LatentRotaryStoreParams& p, int64_t token, int head, float* prepared) {
  const T* latent = static_cast<const T*>(p.q_latent) + (token * p.heads + head) * p.rank;
  const T* rope = static_cast<const T*>(p.q_rope) + token * p.q_rope_stride + head * p.q_rope_head_stride;
  T* out = static_cast<T*>(p.out) + (token * p.heads + head) * (p.rank + p.rotary_dim);
  const int64_t position = p.positions[token];
  const float scale = p.query_scales == nullptr ? 1.0f : p.query_scales[position];
  for_each_vector(p.rotary_dim,
                  [&](int64_t i, int64_t lanes) { store_lanes(prepared + i, load_lanes(rope + i, lanes), lanes); });
  rotate_head(prepared, p.cos_sin_cache + position * p.rotary_dim, p.rotary_dim, p.interleaved);
  for_each_vector(
      p.rank, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(latent + i, lanes) * scale, lanes); });
  for_each_vector(p.rotary_dim, [&](int64_t i, int64_t lanes) {
    store_lanes(out + p.rank + i, load_lanes(prepared + i, lanes) * scale, lanes);
  });
}

template <class T>
void store_row(const LatentRotaryStoreParams& p, int64_t token, float* prepared) {
  const int64_t slot = p.cache.slot_mapping[token];
  if (slot < 0) return;
  const T* kv = static_cast<const T*>(p.kv) + token * p.kv_stride;
  dispatch(p.weight_dtype,
           [&]<class W>(W) { rms_norm_row(kv, static_cast<const W*>(p.norm_weight), p.rank, p.eps, prepared); });
  float* const rope = prepared + p.rank;
  for_each_vector(p.rotary_dim,
                  [&](int64_t i, int64_t lanes) { store_lanes(rope + i, load_lanes(kv + p.rank + i, lanes), lanes); });
  rotate_head(rope, p.cos_sin_cache + p.positions[token] * p.rotary_dim, p.rotary_dim, p.interleaved);
  store_head<kInt4KeyGroup>(p.cache, prepared, p.cache.k, p.cache.k_scale, slot, 0);
}

}  // namespace

void latent_rotary_store(const LatentRotaryStoreParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      float* prepared = scratch_array<float>(0, p.rank + p.rotary_dim);
      for (int64_t token = begin; token < end; ++token) {
        for (int head = 0; head < p.heads; ++head) join_query<T>(p, token, head, prepared);
        store_row<T>(p, token, prepared);
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
