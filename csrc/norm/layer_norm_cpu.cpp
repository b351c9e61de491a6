#include "norm/layer_norm.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

namespace {

FASTINFER_INLINE f32v first_lanes(f32v v, int64_t lanes) {
  if (lanes == kLanes) return v;
  float values[kLanes];
  store(values, v);
  return load_partial(values, lanes);
}

// Sum of fn(i, lanes) over a row, in four chains: in one, each addition would wait for the one before.
template <class Fn>
FASTINFER_INLINE float sum_row(int64_t hidden, Fn&& fn) {
  constexpr int kChains = 4;
  f32v sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= hidden; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) sums[c] += fn(i + c * kLanes, kLanes);
  }
  for_each_vector(hidden - i, [&](int64_t rest, int64_t lanes) { sums[0] += fn(i + rest, lanes); });
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The variance from the differences to the mean, in a sweep of its own: mean(x^2) - mean(x)^2 cancels.
template <class T, class W>
void layer_norm_row(const T* x, const W* weight, const W* bias, int64_t hidden, float eps, T* out) {
  const auto width = static_cast<float>(hidden);
  const f32v mean =
      broadcast(sum_row(hidden, [&](int64_t i, int64_t lanes) { return load_lanes(x + i, lanes); }) / width);
  const float squares = sum_row(hidden, [&](int64_t i, int64_t lanes) {
    const f32v difference = first_lanes(load_lanes(x + i, lanes) - mean, lanes);
    return difference * difference;
  });
  const f32v scale = broadcast(1.0f / std::sqrt(squares / width + eps));
  for_each_vector(hidden, [&](int64_t i, int64_t lanes) {
    const f32v normed = (load_lanes(x + i, lanes) - mean) * scale;
    store_lanes(out + i, normed * load_lanes(weight + i, lanes) + load_lanes(bias + i, lanes), lanes);
  });
}

}  // namespace

void layer_norm(const LayerNormParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch(p.weight_dtype, [&]<class W>(W) {
      parallel_for(p.rows, [&](int64_t begin, int64_t end) {
        for (int64_t offset = begin * p.hidden; offset < end * p.hidden; offset += p.hidden) {
          layer_norm_row(static_cast<const T*>(p.x) + offset, static_cast<const W*>(p.weight),
                         static_cast<const W*>(p.bias), p.hidden, p.eps, static_cast<T*>(p.out) + offset);
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
