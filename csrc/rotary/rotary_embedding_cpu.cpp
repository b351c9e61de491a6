#include "rotary/rotary_embedding.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class T>
void rotate_halves(T* head, const float* cos, const float* sin, int half) {
  for_each_vector(half, [&](int64_t i, int64_t lanes) {
    const f32v x = load_lanes(head + i, lanes), y = load_lanes(head + half + i, lanes);
    const f32v c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(head + i, x * c - y * s, lanes);
    store_lanes(head + half + i, y * c + x * s, lanes);
  });
}

template <class T>
void rotate_pairs(T* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float x = to_float(head[2 * i]), y = to_float(head[2 * i + 1]);
    head[2 * i] = from_float<T>(x * cos[i] - y * sin[i]);
    head[2 * i + 1] = from_float<T>(y * cos[i] + x * sin[i]);
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& p) {
  const int half = p.rotary_dim / 2;
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const float* cos = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
        const auto rotate = [&](T* heads, int count) {
          for (int h = 0; h < count; ++h) {
            T* head = heads + static_cast<int64_t>(h) * p.head_dim;
            p.interleaved ? rotate_pairs(head, cos, cos + half, half) : rotate_halves(head, cos, cos + half, half);
          }
        };
        rotate(static_cast<T*>(p.q) + token * p.q_stride, p.q_heads);
        rotate(static_cast<T*>(p.k) + token * p.k_stride, p.kv_heads);
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
