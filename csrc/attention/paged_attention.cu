// Paged attention on the GPU: flash attention whose blocks share the whole batch's work evenly, however ragged.
//
//   plan (once per step): the line of work units, and where each block's stretch of it begins
//   each block, for each row tile in its stretch:
//     O, maximum, sum = flash attention over its KV tiles       paged_attention_rows_cuda.h
//     all of the row tile's tiles were in the stretch?  ->  out
//     else  ->  workspace; the block that comes last merges all parts, in their order, ->  out
//
// The order of sums depends on the plan, and so on the batch unless that is batch-invariant, but never on timing. After
// FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691); the even stretches after Stream-K (Osama et al.,
// 2023, https://arxiv.org/abs/2301.03598).
#include "attention/paged_attention.h"

#include "attention/paged_attention_rows_cuda.h"
#include "common/cuda/launch.h"

namespace fastinfer::cuda {
namespace {

// Q's rows, zeros past the last.
template <class T, int kHeadDim>
__device__ void load_rows(const PagedAttentionParams& p, const QueryRows& queries, const RowTile& rows, int head,
                          bool decode) {
  using Shared = Tiles<T, kHeadDim>;
  const int count = decode ? kDecodeRows : kRowTile;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.q) % 16 | (p.q_stride * sizeof(T)) % 16) == 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < count * Shared::kChunks; i += kAttentionThreads) {
    const int row = rows.row_begin + i / Shared::kChunks, chunk = i % Shared::kChunks;
    Vector<T, 8> q{};
    if (row < rows.row_end) {
      const int64_t token = queries.first_query + row / queries.group;
      const T* from = static_cast<const T*>(p.q) + token * p.q_stride +
                      (int64_t{head} * queries.group + row % queries.group) * kHeadDim + chunk * 8;
      if (aligned) {
        q = load_vector<8>(from);
      } else {
        for (int j = 0; j < 8; ++j) q.values[j] = from[j];
      }
    }
    store_vector(reinterpret_cast<T*>(Shared::queries() + chunk_offset<Shared::kChunks>(row - rows.row_begin, chunk)),
                 q);
  }
}

// Merges partial results, and passes each row's to store, eight columns at a time.
template <int kHeadDim, class PartialAt, class Store>
__device__ void merge(int rows, int partials, const PartialAt& partial_at, const Store& store) {
  for (int i = threadIdx.x; i < rows * (kHeadDim / 8); i += kAttentionThreads) {
    const int row = i / (kHeadDim / 8), column = i % (kHeadDim / 8) * 8;
    OnlineSoftmax<float> softmax;
    for (int j = 0; j < partials; ++j) softmax.maximum = fmaxf(softmax.maximum, partial_at(j).maximum[row]);
    Vector<float, 8> values{};
    for (int j = 0; j < partials; ++j) {
      const Partial partial = partial_at(j);
      const float weight = softmax.add({partial.maximum[row], partial.sum[row]}, Exp2{});
      for (int half = 0; half < 2; ++half) {
        const float* const from = partial.values + row * result_stride(kHeadDim);
        const auto v = load_vector<4>(from + split_four(kHeadDim, column, half));
        for (int k = 0; k < 4; ++k) values.values[4 * half + k] += weight * v.values[k];
      }
    }
    store(row, column, softmax, values.values);
  }
}

// Adds the sink, divides by the sum, and writes eight columns of the output; the first ones' thread writes the lse.
template <class T>
__device__ void store_output(const PagedAttentionParams& p, int64_t token, int head, int column,
                             OnlineSoftmax<float> softmax, const float (&values)[8]) {
  float factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2e;
    factor = softmax.raise_maximum(fmaxf(softmax.maximum, sink), Exp2{});
    softmax.add({sink, 1.0f}, Exp2{});
  }
  factor = softmax.sum == 0.0f ? 0.0f : factor / softmax.sum;  // the sum is 0 where no position is visible
  const int64_t row = token * p.q_heads + head;
  Vector<T, 8> out;
  for (int k = 0; k < 8; ++k) out.values[k] = from_float<T>(values[k] * factor);
  store_vector(static_cast<T*>(p.out) + row * p.head_dim + column, out);
  if (p.lse != nullptr && column == 0) {
    p.lse[row] = softmax.sum == 0.0f ? kNegInf : (softmax.maximum + log2f(softmax.sum)) / kLog2e;
  }
}

// One row tile, or the part of it that lies in this block's stretch, `done` units after its begin.
template <class T, int kHeadDim, bool kDecode>
__device__ void attend(const PagedAttentionParams& p, const QueryRows& queries, const RowTile& rows,
                       const WorkPosition& at, int tiles, int done) {
  const auto store_final = [&](int row, int column, const OnlineSoftmax<float>& softmax, const float (&values)[8]) {
    const int query_row = rows.row_begin + row;
    store_output<T>(p, queries.first_query + query_row / queries.group,
                    at.head * queries.group + query_row % queries.group, column, softmax, values);
  };
  const int row_count = rows.row_end - rows.row_begin;
  using Rows = RowAttention<T, kHeadDim, kDecode>;
  {
    TileLoader<T, kHeadDim> loader(p, at.seq, at.head, rows, at.kv_tile, at.kv_tile + tiles);
    Rows(p, queries, rows).run(loader, at.kv_tile, at.kv_tile + tiles);
  }
  if (tiles == rows.kv_tiles) {
    merge<kHeadDim>(row_count, Rows::kPartials, Rows::partial, store_final);
    return;
  }
  // Blocks first .. last have parts: the first one at its stretch's end, the others at their begin.
  const PlanView plan(p.plan, p.blocks, p.seqs);  // made again: registers are scarce in the loop above
  const int64_t per_block = plan.header->units_per_block, begin = blockIdx.x * per_block + done - at.kv_tile;
  const int first = static_cast<int>(begin / per_block);
  const int parts = static_cast<int>((begin + rows.kv_tiles - 1) / per_block) - first + 1;
  const auto part_of = [&](int part) {
    return p.workspace + (2 * (first + part) + (part == 0)) * partial_floats(kHeadDim);
  };
  const int part = static_cast<int>(blockIdx.x) - first;
  constexpr int kStride = result_stride(kHeadDim);
  merge<kHeadDim>(row_count, Rows::kPartials, Rows::partial,
                  [&](int row, int column, const OnlineSoftmax<float>& softmax, const float (&values)[8]) {
                    float* const own = part_of(part);
                    for (int half = 0; half < 2; ++half) {
                      Vector<float, 4> v;
                      for (int k = 0; k < 4; ++k) v.values[k] = values[4 * half + k];
                      store_vector(own + row * kStride + split_four(kHeadDim, column, half), v);
                    }
                    if (column == 0) {
                      own[kRowTile * kStride + row] = softmax.maximum;
                      own[kRowTile * (kStride + 1) + row] = softmax.sum;
                    }
                  });
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&plan.arrived[first], 1) == parts - 1;
    __threadfence();
    if (last) atomicExch(&plan.arrived[first], 0);  // for the next call with this plan
  }
  if (!__syncthreads_or(last)) return;
  __threadfence();
  merge<kHeadDim>(
      row_count, parts,
      [&](int j) {
        const float* values = part_of(j);
        return Partial{values, values + kRowTile * kStride, values + kRowTile * (kStride + 1)};
      },
      store_final);
}

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PlanView plan(p.plan, p.blocks, p.seqs);
  const bool cuts = plan.header->units_per_block > 0;
  const int units = plan.counts[blockIdx.x];
  if (units <= 0) return;
  int done = 0;
  for (WorkPosition at = plan.starts[blockIdx.x]; at.seq < p.seqs; at = {at.seq + 1, 0, 0, 0}) {
    const QueryRows queries(p.query_start, p.seq_lens, at.seq, p.q_heads / p.kv_heads);
    for (; at.head < p.kv_heads; ++at.head, at.row_tile = 0) {
      for (; at.row_tile < queries.row_tiles(); ++at.row_tile, at.kv_tile = 0) {
        const RowTile rows(queries, at.row_tile, p.window, Tiles<T, kHeadDim>::kTile);
        const int tiles = min(rows.kv_tiles - at.kv_tile, units - done);
        const bool decode = cuts && rows.row_end - rows.row_begin <= kDecodeRows;
        load_rows<T, kHeadDim>(p, queries, rows, at.head, decode);
        if (decode) {
          attend<T, kHeadDim, true>(p, queries, rows, at, tiles, done);
        } else {
          attend<T, kHeadDim, false>(p, queries, rows, at, tiles, done);
        }
        done += tiles;
        if (done == units) return;
        __syncthreads();  // shared memory is used again
      }
    }
  }
}

template <class T>
void launch_head_dim(const PagedAttentionParams& p, void* stream) {
  const auto run = [&]<int kHeadDim>() {
    launch("paged_attention", paged_attention_kernel<T, kHeadDim>, attention_launch(kHeadDim, p.blocks), stream, p);
  };
  switch (p.head_dim) {
    case 64: return run.template operator()<64>();
    case 80: return run.template operator()<80>();
    case 96: return run.template operator()<96>();
    case 128: return run.template operator()<128>();
    default: return run.template operator()<256>();
  }
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, void* stream) {
  p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, stream) : launch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace fastinfer::cuda
