// Shared memory of a paged attention block: the layout of tiles, their copy from the pages, and the conversion of
// quantized ones to 16-bit floats.
#pragma once

#include "attention/kv_int4_cuda.h"
#include "attention/paged_attention.h"
#include "attention/paged_attention_work_cuda.h"
#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {

// Rows of kChunks 16-byte chunks, placed so that one chunk each of eight rows in a row lies in different banks, as
// ldmatrix reads them: by exclusive or, or where that would leave the row by an odd distance between rows. The chunk is
// even + odd: an even number, best a constant, and 0 or 1, so that few different sums are left for registers.
template <int kChunks>
__device__ inline int chunk_offset(int row, int even, int odd) {
  constexpr int kStride = row_stride(kChunks * 8);
  if constexpr (kStride != kChunks) return (row * kStride + odd) * 16 + even * 16;
  return (row * kStride + (((row & 7) ^ odd) ^ (even & 7))) * 16 + (even & ~7) * 16;
}

template <int kChunks>
__device__ inline int chunk_offset(int row, int chunk) {
  return chunk_offset<kChunks>(row, chunk & ~1, chunk & 1);
}

// Quantized values of V are made 128 times smaller and their scales as much larger, both exactly: times a bare scale of
// 1/1000 the smaller probabilities would fall below fp16's normal numbers.
inline constexpr float kValueFactor = 128.0f;

// Four e4m3 or int8 in a word become two words of T, exactly. A shift puts an e4m3's
// exponent and mantissa where T has them; the product mends the exponent's bias, and makes subnormals normal. (The one
// NaN of e4m3 becomes 480: a store that saturates never writes it.)
template <class T>
__device__ void widen_fp8(uint32_t x, bool values, uint32_t (&out)[2]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr int kShift = kHalf ? 1 : 4;                                // from bit 7 + 8 down to T's exponent
  const uint32_t bias = kHalf ? (values ? 0x40004000u : 0x5c005c00u)   // 2^1, 2^8
                              : (values ? 0x78007800u : 0x7b807b80u);  // 2^113, 2^120
  for (int i = 0; i < 2; ++i) {
    const uint32_t spread = prmt(x, 0, i == 0 ? 0x1404 : 0x3424);  // bytes to the upper halves
    out[i] = mul2<T>((spread & 0x80008000u) | ((spread & 0x7fff7fffu) >> kShift), bias);
  }
}

// fp16: 0x6400 | u is 1024 + u. bf16 has room for seven bits: 128 + the low ones, minus 128 or, with the sign, 256.
template <class T>
__device__ void widen_int8(uint32_t x, bool values, uint32_t (&out)[2]) {
  const uint32_t factor = std::is_same_v<T, __half> ? (values ? 0x20002000u : 0x3c003c00u)   // 2^-7, 1
                                                    : (values ? 0x3c003c00u : 0x3f803f80u);  // likewise
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      out[i] = mul2<T>(sub2<T>(prmt(x ^ 0x80808080u, 0x64646464u, i == 0 ? 0x4140 : 0x4342), 0x64806480u), factor);
    } else {
      const uint32_t spread = prmt(x, 0x43434343u, i == 0 ? 0x4140 : 0x4342);
      out[i] = mul2<T>(sub2<T>(spread & 0xff7fff7fu, (spread & 0x00800080u) | 0x43004300u), factor);
    }
  }
}

template <class T, int kHeadDim>
struct Tiles {
  static constexpr int kTile = kv_tile(kHeadDim);
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kKeyGroups = int4_groups(kHeadDim, kInt4KeyGroup);
  static constexpr int kValueGroups = int4_groups(kHeadDim, kInt4ValueGroup);
  static constexpr int kRowBytes = row_stride(kHeadDim) * 16;
  static constexpr int kTileBytes = kTile * kRowBytes;

  // [kRowTile] rows of Q; at the end of a row tile the rows' maxima and sums, and then, into the stages, its results.
  __device__ static unsigned char* queries() {
    return dynamic_shared();
  }
  // Two stages of K and V.
  __device__ static unsigned char* stage(int index, bool values) {
    return queries() + kRowTile * kRowBytes + (2 * index + values) * kTileBytes;
  }
  // Quantized tiles are half as large: both stages of them lie in the second stage's place, and become 16-bit in the
  // first one's.
  __device__ static unsigned char* quantized_stage(int index, bool values) {
    return stage(1, false) + (2 * index + values) * kTile * kHeadDim;
  }
  __device__ static float* scales(int index, bool values) {
    return reinterpret_cast<float*>(stage(2, false)) + (2 * index + values) * kTile;
  }
  // Stages of int4 are half as large again. Their scales follow them and take up to half of their size.
  __device__ static unsigned char* int4_stage(int index, bool values) {
    return stage(1, false) + (2 * index + values) * kTile * (kHeadDim / 2);
  }
  __device__ static unsigned char* int4_scales(int index, bool values) {
    return int4_stage(2, false) + (index * (kKeyGroups + kValueGroups) + values * kKeyGroups) * kTile * 4;
  }

  __device__ static void widen_int4_tiles(int index) {
    constexpr int kWords = kTile * kChunks;  // eight codes each
#pragma unroll 1
    for (int i = opaque(threadIdx.x); i < 2 * kWords; i += kAttentionThreads) {
      const bool values = i >= kWords;
      const int word = values ? i - kWords : i, row = word / kChunks, chunk = word % kChunks;
      const int group =
          values ? row * kValueGroups + chunk * 8 / kInt4ValueGroup : row * kKeyGroups + chunk * 8 / kInt4KeyGroup;
      Vector<uint32_t, 4> wide;
      widen_int4<T>(reinterpret_cast<const uint32_t*>(int4_stage(index, values))[word],
                    reinterpret_cast<const uint32_t*>(int4_scales(index, values))[group], wide.values);
      store_vector(reinterpret_cast<uint32_t*>(stage(0, values) + chunk_offset<kChunks>(row, chunk)), wide);
    }
  }

  __device__ static void widen(int index, CacheQuantization quantization) {
    if (quantization == CacheQuantization::kInt4) return widen_int4_tiles(index);
    const bool fp8 = quantization == CacheQuantization::kFp8;
    constexpr int kVectors =
        kTile * kChunks;  // eight bytes each: 16 would become two chunks apart, whose banks collide
#pragma unroll 1
    for (int i = opaque(threadIdx.x); i < 2 * kVectors; i += kAttentionThreads) {
      const bool values = i >= kVectors;
      const int vector = values ? i - kVectors : i;
      const auto packed =
          load_vector<2>(reinterpret_cast<const uint32_t*>(quantized_stage(index, values)) + 2 * vector);
      uint32_t low[2], high[2];
      if (fp8) {
        widen_fp8<T>(packed.values[0], values, low), widen_fp8<T>(packed.values[1], values, high);
      } else {
        widen_int8<T>(packed.values[0], values, low), widen_int8<T>(packed.values[1], values, high);
      }
      auto* const to = stage(0, values) + chunk_offset<kChunks>(vector / kChunks, vector % kChunks);
      store_vector(reinterpret_cast<uint32_t*>(to), Vector<uint32_t, 4>{low[0], low[1], high[0], high[1]});
    }
  }
};

// Copies a KV head's tiles of a row tile into shared memory, one after another. Positions that no row sees are not
// read: they become zeros.
template <class T, int kHeadDim>
class TileLoader {
  using Shared = Tiles<T, kHeadDim>;
  static constexpr int kRows = Shared::kTile / kAttentionWarps;  // rows of a tile that a warp copies

 public:
  __device__ TileLoader(const PagedAttentionParams& p, int seq, int head, const RowTile& rows, int first, int end)
      : p_(p),
        seq_(seq),
        head_(head),
        kv_begin_(rows.kv_begin),
        kv_end_(rows.kv_end),
        tile_(rows.first_kv_tile + first),
        end_(rows.first_kv_tile + end) {
    slot_ = slot_of(tile_);
  }

  // Starts the copy of the next tile, if there is one, as one group.
  __device__ void start(int stage) {
    if (tile_ < end_) {
      const int slot = slot_;
      slot_ = slot_of(++tile_);  // read one tile ahead: the table's latency is hidden
      if (p_.quantization == CacheQuantization::kNone) {
        copy<kHeadDim * 2>(slot, [&](bool values, int row, int byte) {
          return Shared::stage(stage, values) + chunk_offset<kHeadDim / 8>(row, byte / 16);
        });
      } else if (p_.quantization == CacheQuantization::kInt4) {
        copy<kHeadDim / 2>(slot, [&](bool values, int row, int byte) {
          return Shared::int4_stage(stage, values) + row * (kHeadDim / 2) + byte;
        });
        copy_int4_scales<Shared::kKeyGroups * 4>(slot, p_.k_scale, Shared::int4_scales(stage, false));
        copy_int4_scales<Shared::kValueGroups * 4>(slot, p_.v_scale, Shared::int4_scales(stage, true));
      } else {
        copy<kHeadDim>(slot, [&](bool values, int row, int byte) {
          return Shared::quantized_stage(stage, values) + row * kHeadDim + byte;
        });
        copy_scales(slot, stage);
      }
    }
    cp_async_commit();
  }

 private:
  // The cache's row of this lane's position, -1 for none.
  __device__ int slot_of(int tile) const {
    const int lane = threadIdx.x % kWarpSize;
    const int position = tile * Shared::kTile + warp_row() + lane;
    if (lane >= kRows || tile >= end_ || position < kv_begin_ || position >= kv_end_) return -1;
    const int page = position / p_.block_size;
    return p_.block_table[seq_ * p_.max_blocks + page] * p_.block_size + (position - page * p_.block_size);
  }

  __device__ static int warp_row() {
    return static_cast<int>(threadIdx.x) / kWarpSize * kRows;
  }

  template <int kBytes>
  static constexpr int kChunkOf = kBytes % 16 == 0  ? 16
                                  : kBytes % 8 == 0 ? 8
                                                    : 4;

  // Calls fn(row, byte, offset, valid) for each chunk of the warp's rows of kBytes; it lies at `offset` in the cache.
  template <int kBytes, class Fn>
  __device__ void for_each_chunk(int own_slot, const Fn& fn) const {
    constexpr int kChunk = kChunkOf<kBytes>, kChunks = kBytes / kChunk, kCount = kRows * kChunks;
    const int64_t slot_bytes = int64_t{kBytes} * p_.kv_heads;
    const int lane = opaque(threadIdx.x) % kWarpSize;
#pragma unroll 2
    for (int first = 0; first < kCount; first += kWarpSize) {
      const int i = first + lane;
      const int row = i / kChunks, byte = i % kChunks * kChunk;
      const int slot = __shfl_sync(kFullMask, own_slot, row);
      if (kCount % kWarpSize != 0 && i >= kCount) continue;
      fn(warp_row() + row, byte, slot >= 0 ? slot * slot_bytes + head_ * kBytes + byte : int64_t{0}, slot >= 0);
    }
  }

  template <int kChunk>
  __device__ static void copy_chunk(void* to, const void* from, int64_t offset, bool valid) {
    const auto* const chunk = static_cast<const unsigned char*>(from) + offset;
    if constexpr (kChunk == 16) {
      cp_async(to, chunk, valid);
    } else {
      cp_async_small<kChunk>(to, chunk, valid);
    }
  }

  template <int kBytes, class Place>
  __device__ void copy(int own_slot, const Place& place) const {
    for_each_chunk<kBytes>(own_slot, [&](int row, int byte, int64_t offset, bool valid) {
      copy_chunk<kChunkOf<kBytes>>(place(false, row, byte), p_.k_cache, offset, valid);
      copy_chunk<kChunkOf<kBytes>>(place(true, row, byte), p_.v_cache, offset, valid);
    });
  }

  template <int kBytes>
  __device__ void copy_int4_scales(int own_slot, const void* scales, unsigned char* to) const {
    for_each_chunk<kBytes>(own_slot, [&](int row, int byte, int64_t offset, bool valid) {
      copy_chunk<kChunkOf<kBytes>>(to + row * kBytes + byte, scales, offset, valid);
    });
  }

  __device__ void copy_scales(int slot, int stage) const {
    const int lane = threadIdx.x % kWarpSize;
    if (lane >= kRows) return;
    const int64_t offset = slot >= 0 ? int64_t{slot} * p_.kv_heads + head_ : 0;
    cp_async_small<4>(Shared::scales(stage, false) + warp_row() + lane, static_cast<const float*>(p_.k_scale) + offset,
                      slot >= 0);
    cp_async_small<4>(Shared::scales(stage, true) + warp_row() + lane, static_cast<const float*>(p_.v_scale) + offset,
                      slot >= 0);
  }

  const PagedAttentionParams& p_;
  int seq_, head_, kv_begin_, kv_end_;
  int tile_, end_;
  int slot_;
};

}  // namespace fastinfer::cuda
