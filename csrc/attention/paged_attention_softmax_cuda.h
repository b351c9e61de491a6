// The softmax of flash attention, on logits that lie in a warp's registers as mma leaves them.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention/paged_attention.h"
#include "attention/paged_attention_work_cuda.h"
#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"
#include "common/online_softmax.h"

namespace fastinfer::cuda {

// The exponential of attention's OnlineSoftmax.
struct Exp2 {
  __device__ float operator()(float x) const {
    return exp2_approx(x);
  }
};

template <class T>
__device__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// kRowTiles times 16 rows of a warp by kPositions positions. Element [r][n][2 i + c] is row 16 r + lane / 4 + 8 i and
// position 8 n + lane % 4 * 2 + c.
template <int kRowTiles, int kPositions>
struct Logits {
  float values[kRowTiles][kPositions / 8][4];

  // Multiplies by a float for each position.
  __device__ void scale_positions(const uint32_t* scales, float factor) {
#pragma unroll
    for (int n = 0; n < kPositions / 8; ++n) {
      const auto pair = load_vector<2>(reinterpret_cast<const float*>(scales) + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float scale = pair.values[c] * factor;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) values[r][n][c] *= scale, values[r][n][2 + c] *= scale;
      }
    }
  }

  // The factors of mma that are the probabilities of 16 positions, k * 16 and on.
  template <class T>
  __device__ void factors(int r, int k, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = pack<T>(values[r][2 * k + i / 2][i % 2 * 2], values[r][2 * k + i / 2][i % 2 * 2 + 1]);
  }
};

// The running softmax of a warp's rows: those that all warps share in decode, else its own, or those of kSharing warps,
// in the order of the warps. With kLazy a row's maximum stays where it is until a logit exceeds it by kSlack, so that
// results are rarely rescaled: probabilities are up to 2^kSlack then (FlashAttention 4 does so).
template <int kRowTiles, bool kDecode, bool kQueryFactors, int kSharing = 1, bool kLazy = false>
class RowSoftmax {
  static constexpr float kSlack = 8.0f;

 public:
  // `query_factors`: of each row of the row tile, what its queries were divided by, a power of two. The rows of the
  // first warp begin with `row0` of the row tile.
  __device__ RowSoftmax(const PagedAttentionParams& p, const WorkItem& item, const float* query_factors, int row0 = 0)
      : p_(p) {
    const int row = row0 + warp_row();
    const int first = item.rows.row_begin + row, group = item.queries.group;
    row0_ = item.rows.row_begin + row0;
    first_query_position_ = item.queries.first_position;
    first_position_ = item.queries.first_position + first / group;
    // A warp without rows sees nothing.
    last_position_ =
        first < item.rows.row_end ? item.queries.first_position + (first + 16 * kRowTiles - 1) / group : -1;
    for (int k = 0; kQueryFactors && k < 2 * kRowTiles; ++k) {
      const int own = static_cast<int>(threadIdx.x) % kWarpSize / 4 + 8 * k;
      exponents_ |= __float_as_uint(query_factors[row + own]) >> 23 << 8 * k;
    }
  }

  // Does a row of the warp see any of these positions?
  __device__ bool sees(int first, int count) const {
    return first <= last_position_ && (p_.window == 0 || first + count > p_.first_visible(first_position_));
  }

  // Turns the logits of positions `first` and on into probabilities relative to the rows' maxima, which may rise
  // before. Where one of the warp's maxima moved, calls rescale(r, i, factor) for the results so far of each row.
  template <int kPositions, class Rescale>
  __device__ void update(Logits<kRowTiles, kPositions>& logits, int first, const Rescale& rescale) {
    auto& s = logits.values;
    // A positive factor may wait for the exponential, if it is not so small that times a query's factor it becomes
    // zero. Decode has too few to gain by it.
    const bool multiply = kDecode || p_.softcap > 0.0f || !(p_.scale > 1e-18f);
    if (multiply) [[unlikely]] {
      const float before = p_.softcap > 0.0f ? 2.0f / p_.softcap : 1.0f, after = p_.softcap * kLog2e;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int n = 0; n < kPositions / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& logit = s[r][n][i];
            logit *= factor(r, i / 2) * before;
            // tanh(x) = 1 - 2 / (exp(2 x) + 1)
            if (p_.softcap > 0.0f) logit = after * (1.0f - __fdividef(2.0f, exp2_approx(logit) + 1.0f));
          }
        }
      }
    }
    if (first + kPositions - 1 > first_position_ || (p_.window > 0 && first < p_.first_visible(last_position_)))
        [[unlikely]] {
      mask(logits, first);
    }
    float maximum[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = fmaxf(s[r][0][2 * i], s[r][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < kPositions / 8; ++n) largest = fmaxf(largest, fmaxf(s[r][n][2 * i], s[r][n][2 * i + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
        largest = multiply ? largest : largest * factor(r, i);
        const float before = state_[r][i].maximum;
        maximum[r][i] = largest > (kLazy ? before + kSlack : before) ? largest : before;
        moved |= maximum[r][i] > before;
      }
    }
    if (__any_sync(kFullMask, moved)) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rescale(r, i, state_[r][i].raise_maximum(maximum[r][i], Exp2{}));
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float times = multiply ? 1.0f : factor(r, i);
#pragma unroll
        for (int n = 0; n < kPositions / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& probability = s[r][n][2 * i + c];
            probability = exp2_approx(fmaf(probability, times, -state_[r][i].maximum));
            state_[r][i].sum += probability;
          }
        }
      }
    }
  }

  __device__ float maximum(int r, int i) const {
    return state_[r][i].maximum;
  }
  // Over all positions so far. All lanes must call it.
  __device__ float sum(int r, int i) const {
    return sum_of_four(state_[r][i].sum);
  }
  __device__ static float sum_of_four(float value) {
    value += __shfl_xor_sync(kFullMask, value, 1);
    return value + __shfl_xor_sync(kFullMask, value, 2);
  }

 private:
  // The warp's first row, counted from the first warp's.
  __device__ static int warp_row() {
    return kDecode ? 0 : static_cast<int>(opaque(threadIdx.x) / kWarpSize / kSharing) * 16 * kRowTiles;
  }

  // Of a row's logits.
  __device__ float factor(int r, int i) const {
    const float factor = p_.scale * kLog2e;
    if constexpr (!kQueryFactors) return factor;
    return factor * __uint_as_float((exponents_ >> 8 * (2 * r + i) & 0xffu) << 23);
  }

  template <int kPositions>
  __device__ void mask(Logits<kRowTiles, kPositions>& logits, int first) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Positions begin .. end - 1 are seen, counted from the lane's first one. Few tiles need this: registers are
        // for the others.
        const int lane = static_cast<int>(opaque(threadIdx.x) % kWarpSize);
        const int row = row0_ + warp_row() + 16 * r + lane / 4 + 8 * i;
        const int at = first_query_position_ + row / (p_.q_heads / p_.kv_heads), offset = first + lane % 4 * 2;
        const int begin = p_.first_visible(at) - offset, end = at + 1 - offset;
#pragma unroll
        for (int n = 0; n < kPositions / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int position = n * 8 + c;
            if (position >= end || position < begin) logits.values[r][n][2 * i + c] = kNegInf;
          }
        }
      }
    }
  }

  const PagedAttentionParams& p_;
  int row0_;                                  // the first warp's first row, of the sequence and KV head
  int first_query_position_;                  // of the sequence
  int first_position_, last_position_;        // of the warp's queries
  uint32_t exponents_ = 0;                    // of the rows' query factors, as a float has them; a byte each
  OnlineSoftmax<float> state_[kRowTiles][2];  // the sums are those of this lane's positions
};

}  // namespace fastinfer::cuda
