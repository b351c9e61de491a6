// Results of attention on their way out: in shared memory, in the workspace, and at last as the output.
#pragma once

#include "attention/paged_attention_softmax_cuda.h"
#include "attention/paged_attention_work_cuda.h"
#include "common/cuda/arrival.h"

namespace fastinfer::cuda {

// Rows of sums of values, relative to exp2 of their maxima, in shared memory, and the maxima and the sums of
// exponentials. The units of 16 bytes are placed so that neither the fragments of mma, in whatever order of columns,
// nor rows read eight columns at a time meet the same banks twice.
template <int kHeadDim, int kRows>
struct SharedResults {
  float* memory;
  float* statistics;

  static constexpr int kColumns = value_columns(kHeadDim);
  static constexpr int kBytes = kRows * kColumns * static_cast<int>(sizeof(float));
  static constexpr int kStatisticsBytes = 2 * kRows * static_cast<int>(sizeof(float));

  // The place of four columns.
  __device__ float* at(int row, int column) const {
    const int unit = column >> 2 ^ (column >> 5 & 1) ^ (row & 1) * (kColumns % 32 == 0 ? 5 : 1) ^ (row & 2);
    return memory + row * kColumns + unit * 4;
  }
  __device__ float& maximum(int row) const {
    return statistics[row];
  }
  __device__ float& sum(int row) const {
    return statistics[kRows + row];
  }
};

// The same in the workspace, in runs that neighbouring lanes read.
template <int kHeadDim>
struct WorkspaceResults {
  float* memory;

  __device__ float* at(int row, int column) const {
    return memory + row * result_stride(kHeadDim) + split_four(value_columns(kHeadDim), column & ~7, column >> 2 & 1);
  }
  __device__ float& maximum(int row) const {
    return memory[row_tile(kHeadDim) * result_stride(kHeadDim) + row];
  }
  __device__ float& sum(int row) const {
    return memory[row_tile(kHeadDim) * (result_stride(kHeadDim) + 1) + row];
  }
};

// Merges `parts` results of each row, of which row + part * part_rows is the row in `results(part)`, and passes each to
// store, kColumns at a time. A thread has kPieces such pieces at a time, and kParts parts of each: their loads do not
// wait for each other.
template <int kHeadDim, int kColumns, int kPieces, int kParts, class Results, class Store>
__device__ void merge(int rows, int parts, int part_rows, const Results& results, const Store& store) {
  constexpr int kRowPieces = value_columns(kHeadDim) / kColumns;
  const int count = rows * kRowPieces;
  for (int first = threadIdx.x; first < count; first += kPieces * kAttentionThreads) {
    OnlineSoftmax<float> softmax[kPieces];
    Vector<float, kColumns> values[kPieces]{};
    // Behind the last piece it comes again.
    const auto piece = [&](int i) { return min(first + i * kAttentionThreads, count - 1); };
    for (int begin = 0; begin < parts; begin += kParts) {
      OnlineSoftmax<float> added[kPieces][kParts];
      Vector<float, 4> added_values[kPieces][kParts][kColumns / 4];
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const int part = min(begin + j, parts - 1);  // behind the last one it comes again, without a weight
        const auto from = results(part);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int row = piece(i) / kRowPieces + part * part_rows, column = piece(i) % kRowPieces * kColumns;
          if (begin + j < parts) added[i][j] = {from.maximum(row), from.sum(row)};
          for (int k = 0; k < kColumns; k += 4) added_values[i][j][k / 4] = load_vector<4>(from.at(row, column + k));
        }
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        float largest = softmax[i].maximum;
#pragma unroll
        for (int j = 0; j < kParts; ++j) largest = fmaxf(largest, added[i][j].maximum);
        const float factor = softmax[i].raise_maximum(largest, Exp2{});
        for (float& value : values[i].values) value *= factor;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const float weight = softmax[i].add(added[i][j], Exp2{});
          for (int k = 0; k < kColumns; ++k) values[i].values[k] += weight * added_values[i][j][k / 4].values[k % 4];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + i * kAttentionThreads >= count) break;
      store(piece(i) / kRowPieces, piece(i) % kRowPieces * kColumns, softmax[i], values[i].values);
    }
  }
}

// Passes one result of each row to store, as merge does.
template <int kHeadDim, class Results, class Store>
__device__ void store_rows(int rows, const Results& results, const Store& store) {
  constexpr int kChunks = value_columns(kHeadDim) / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < rows * kChunks; i += kAttentionThreads) {
    const int row = i / kChunks, column = i % kChunks * 8;
    Vector<float, 8> values;
    for (int half = 0; half < 2; ++half) {
      const auto four = load_vector<4>(results.at(row, column + 4 * half));
      for (int k = 0; k < 4; ++k) values.values[4 * half + k] = four.values[k];
    }
    store(row, column, OnlineSoftmax<float>{results.maximum(row), results.sum(row)}, values.values);
  }
}

// Adds the sink, divides by the sum, and writes some columns of the output; the first ones' thread writes the lse.
template <class T, int kCount>
__device__ void store_output(const PagedAttentionParams& p, int64_t token, int head, int column,
                             OnlineSoftmax<float> softmax, const float (&values)[kCount]) {
  float factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2e;
    factor = softmax.raise_maximum(fmaxf(softmax.maximum, sink), Exp2{});
    softmax.add({sink, 1.0f}, Exp2{});
  }
  factor = softmax.sum == 0.0f ? 0.0f : factor / softmax.sum;  // the sum is 0 where no position is visible
  const int64_t row = token * p.q_heads + head;
  Vector<T, kCount> out;
  for (int k = 0; k < kCount; ++k) out.values[k] = from_float<T>(values[k] * factor);
  store_vector(static_cast<T*>(p.out) + row * p.value_dim + column, out);
  if (p.lse != nullptr && column == 0) {
    p.lse[row] = softmax.sum == 0.0f ? kNegInf : (softmax.maximum + log2f(softmax.sum)) / kLog2e;
  }
}

// Writes what the block has of an item: the output if it is all, else into the workspace, where the block that comes
// last merges all parts, in their order. `left`: units of the stretch from the item on. The results hold `partials` for
// each row, kDecodeRows apart.
template <class T, int kHeadDim, bool kFewRows, class Results>
__device__ void write_results(const PagedAttentionParams& p, const WorkItem& item, int left, const Results& results,
                              int partials) {
  const auto store_final = [&]<int kCount>(int row, int column, const OnlineSoftmax<float>& softmax,
                                           const float (&values)[kCount]) {
    const int query_row = item.rows.row_begin + row, group = item.queries.group, query = quotient(query_row, group);
    store_output<T>(p, item.queries.first_query + query, item.at.head * group + query_row - query * group, column,
                    softmax, values);
  };
  const auto own_results = [&](int) { return results; };
  // Of few rows many parts at once, of many rows many pieces.
  constexpr int kColumns = kFewRows ? 4 : 8, kPieces = kFewRows ? 1 : 4;
  const auto merge_own = [&](const auto& store) {
    merge<kHeadDim, kColumns, kPieces, kFewRows ? 4 : 1>(item.row_count(), partials, kDecodeRows, own_results, store);
  };
  if (item.tiles == item.rows.kv_tiles) {
    if (partials == 1) return store_rows<kHeadDim>(item.row_count(), results, store_final);
    return merge_own(store_final);
  }
  // Blocks first .. last have parts: the first one at its stretch's end, the others at their begin.
  const PlanView plan(p.plan, p.blocks, p.lens());
  const int64_t per_block = plan.header->units_per_block,
                begin = blockIdx.x * per_block + plan.counts[blockIdx.x] - left - item.at.kv_tile;
  const int first = static_cast<int>(begin / per_block);
  const int parts = static_cast<int>((begin + item.rows.kv_tiles - 1) / per_block) - first + 1;
  const auto part_of = [&](int part) {
    return WorkspaceResults<kHeadDim>{p.workspace + (2 * (first + part) + (part == 0)) * partial_floats(kHeadDim)};
  };
  const auto own = part_of(static_cast<int>(blockIdx.x) - first);
  merge_own([&]<int kCount>(int row, int column, const OnlineSoftmax<float>& softmax, const float (&values)[kCount]) {
    for (int k = 0; k < kCount; k += 4) {
      store_vector(own.at(row, column + k), Vector<float, 4>{values[k], values[k + 1], values[k + 2], values[k + 3]});
    }
    if (column == 0) own.maximum(row) = softmax.maximum, own.sum(row) = softmax.sum;
  });
  if (!last_to_arrive(plan.arrived + first, parts)) return;
  merge<kHeadDim, kColumns, kPieces, kFewRows ? 8 : 1>(item.row_count(), parts, 0, part_of, store_final);
}

}  // namespace fastinfer::cuda
