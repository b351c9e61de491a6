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
    const int row = item.rows.row_begin + row_of(step);
    if (row >= item.rows.row_end || chunk() >= kChunks) return {};
    const T* const from = chunk_of(p, item, row / item.queries.group, row % item.queries.group);
    return aligned(p) ? load<true>(from) : load<false>(from);
  }

  // All rows of a row tile. What needs no conversion may still be under way, in this thread's open group of copies.
  __device__ static void load_rows(const PagedAttentionParams& p, const WorkItem& item, unsigned char* rows,
                                   float* factors) {
    if (!aligned(p)) {
      load_steps<1>(p, item, [](const T* from) { return load<false>(from); }, rows, factors);
    } else if constexpr (kConverted) {
      load_steps<4>(p, item, [](const T* from) { return load<true>(from); }, rows, factors);
    } else {
      for_each_step<4>(p, item, [&](int step, const T* from) {
        if (kChunks % kLanes != 0 && chunk() >= kChunks) return;
        const bool exists = from != nullptr;
        for (int own = 0; own < kOwn; ++own) {
          const int part = chunk() + own * kLanes;
          cp_async(rows + panel_offset<kSharedChunks, kRows>(row_of(step), part),
                   exists ? from + own * kLanes * 8 : static_cast<const T*>(p.q), exists);
        }
      });
    }
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
  __device__ static bool aligned(const PagedAttentionParams& p) {
    return (reinterpret_cast<uintptr_t>(p.q) % 16 | (p.q_stride * sizeof(T)) % 16) == 0;
  }

  // This lane's chunk of a query of the sequence, and a head of the group.
  __device__ static const T* chunk_of(const PagedAttentionParams& p, const WorkItem& item, int query, int head) {
    return static_cast<const T*>(p.q) + (item.queries.first_query + int64_t{query}) * p.q_stride +
           (int64_t{item.at.head} * item.queries.group + head) * kHeadDim + chunk() * 8;
  }

  template <bool kAligned>
  __device__ static Chunk load(const T* from) {
    Chunk q;
    for (int own = 0; own < kOwn; ++own) {
      const T* const part = from + own * kLanes * 8;
      if constexpr (kAligned) {
        const auto eight = load_vector<8>(part);
        for (int j = 0; j < 8; ++j) q.values[8 * own + j] = eight.values[j];
      } else {
        for (int j = 0; j < 8; ++j) q.values[8 * own + j] = part[j];
      }
    }
    return q;
  }

  // Calls fn(step, this lane's chunk, or null if it has none).
  template <int kUnroll, class Fn>
  __device__ static void for_each_step(const PagedAttentionParams& p, const WorkItem& item, const Fn& fn) {
    // Divisions are slow: a row's query and head follow from those of the step before.
    const int group = item.queries.group, first = item.rows.row_begin + row_of(0);
    const int step_queries = kRowsAtOnce / group, step_heads = kRowsAtOnce - step_queries * group;
    int query = first / group, head = first - query * group;
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      const bool exists = first + step * kRowsAtOnce < item.rows.row_end && chunk() < kChunks;
      fn(step, exists ? chunk_of(p, item, query, head) : nullptr);
      query += step_queries, head += step_heads;
      if (head >= group) ++query, head -= group;
    }
  }

  // kAtOnce loads do not wait for each other.
  template <int kAtOnce, class Load>
  __device__ static void load_steps(const PagedAttentionParams& p, const WorkItem& item, const Load& load,
                                    unsigned char* rows, float* factors) {
    static_assert(kSteps % kAtOnce == 0);
    Chunk q[kAtOnce];
    for_each_step<kAtOnce>(p, item, [&](int step, const T* from) {
      q[step % kAtOnce] = from != nullptr ? load(from) : Chunk{};
      if (step % kAtOnce != kAtOnce - 1) return;
      for (int i = 0; i < kAtOnce; ++i) store(q[i], step - (kAtOnce - 1) + i, rows, factors);
    });
  }

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
