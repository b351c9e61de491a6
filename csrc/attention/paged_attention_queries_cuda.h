// Query rows of paged attention: from global to shared memory, as the products with a cache's keys want them.
#pragma once

#include <cstring>

#include "attention/paged_attention_codes_cuda.h"
#include "attention/paged_attention_tile_cuda.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {

// A group of lanes has a row, one 16-byte chunk each, or two 32 apart at head size 512. Beside quantized keys, bf16
// rows become fp16: divided by a power of two that brings their largest element to 2^14 or just below 2^15, which is
// exact but for elements 2^-28 times as large. In decode their columns are permuted, so that keys' codes need not be
// (see DecodeAttention).
template <class T, CacheQuantization kKind, int kHeadDim, bool kDecode>
class QueryLoader {
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr bool kPermuted = kDecode && kKind != CacheQuantization::kNone;
  static constexpr bool kConverted = !std::is_same_v<T, KeyProduct<T, kKind>>;

 public:
  // Chunks of a row in shared memory: with four bits whole chunks of 32 codes.
  static constexpr int kSharedChunks = kPermuted && kKind == CacheQuantization::kInt4 ? (kChunks + 3) / 4 * 4 : kChunks;
  static constexpr int kLanes = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static constexpr int kOwn = kChunks > 32 ? 2 : 1;  // chunks of a lane
  static constexpr int kRowsAtOnce = kAttentionThreads / kLanes;
  static constexpr int kRows = kDecode ? kDecodeRows : row_tile(kHeadDim);
  static constexpr int kSteps = kRows / kRowsAtOnce;
  using Chunk = Vector<T, 8 * kOwn>;

  // This lane's chunk, or both, of its row of a step; zeros past the last row.
  __device__ static Chunk fetch(const PagedAttentionParams& p, const WorkItem& item, int step) {
    Chunk q{};
    const int row = item.rows.row_begin + row_of(step);
    if (row >= item.rows.row_end || chunk() >= kChunks) return q;
    const bool aligned = (reinterpret_cast<uintptr_t>(p.q) % 16 | (p.q_stride * sizeof(T)) % 16) == 0;
    const int64_t token = item.queries.first_query + row / item.queries.group;
    const T* from = static_cast<const T*>(p.q) + token * p.q_stride +
                    (int64_t{item.at.head} * item.queries.group + row % item.queries.group) * kHeadDim + chunk() * 8;
    for (int own = 0; own < kOwn; ++own) {
      const T* const part = from + own * kLanes * 8;
      if (aligned) {
        const auto eight = load_vector<8>(part);
        for (int j = 0; j < 8; ++j) q.values[8 * own + j] = eight.values[j];
      } else {
        for (int j = 0; j < 8; ++j) q.values[8 * own + j] = part[j];
      }
    }
    return q;
  }

  // Writes it to `rows`, and what it was divided by to `factors`, if it was.
  __device__ static void store(const Chunk& q, int step, unsigned char* rows, float* factors) {
    uint32_t all_words[kOwn][4];
    if constexpr (kConverted) {
      float largest = 0.0f;
      for (int j = 0; j < 8 * kOwn; ++j) largest = fmaxf(largest, fabsf(to_float(q.values[j])));
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, offset));
      }
      // Exponents, as the bits of a float have them. Times the logits' scale, neither factor is far from normal
      // numbers.
      const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 14, 64), 253);
      const float factor = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
      for (int j = 0; j < 4 * kOwn; ++j) {
        const __half2 pair =
            __floats2half2_rn(to_float(q.values[2 * j]) * factor, to_float(q.values[2 * j + 1]) * factor);
        memcpy(&all_words[j / 4][j % 4], &pair, sizeof pair);
      }
      if (chunk() == 0) factors[row_of(step)] = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
    } else {
      memcpy(all_words, &q, sizeof all_words);
    }
    for (int own = 0; own < kOwn; ++own) store_chunk(all_words[own], chunk() + own * kLanes, row_of(step), rows);
  }

 private:
  __device__ static void store_chunk(const uint32_t (&words)[4], int chunk, int row, unsigned char* rows) {
    if (chunk >= kSharedChunks) return;
    const auto at = [&](int to) {
      const int place = kDecode ? chunk_offset<kSharedChunks>(row, to) : panel_offset<kSharedChunks, kRows>(row, to);
      return reinterpret_cast<uint32_t*>(rows + place);
    };
    if constexpr (!kPermuted) {
      store_vector(at(chunk), Vector<uint32_t, 4>{words[0], words[1], words[2], words[3]});
    } else if constexpr (kKind == CacheQuantization::kInt4) {
      // Of 32 columns a lane of mma has eight in a row: word i of both products is columns i and 4 + i of them.
      const int first = chunk / 4 * 4, word = chunk % 4;
      for (int i = 0; i < 4; ++i)
        at(first + i)[word] = prmt(words[i / 2], words[2 + i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    } else {
      // Of 16 columns a lane of mma has four in a row.
      const int first = chunk / 2 * 2, word = chunk % 2 * 2;
      store_vector(at(first) + word, Vector<uint32_t, 2>{words[0], words[2]});
      store_vector(at(first + 1) + word, Vector<uint32_t, 2>{words[1], words[3]});
    }
  }

  __device__ static int chunk() {
    return static_cast<int>(threadIdx.x) % kLanes;
  }
  __device__ static int row_of(int step) {
    return step * kRowsAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  }
};

}  // namespace fastinfer::cuda
