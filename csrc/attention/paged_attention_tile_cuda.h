// Tiles of K and V in shared memory: where their rows lie, and their copy from the pages.
#pragma once

#include "attention/kv_int4.h"
#include "attention/paged_attention.h"
#include "attention/paged_attention_work_cuda.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"

namespace fastinfer::cuda {

// Rows of kChunks 16-byte chunks, placed so that one chunk each of eight rows in a row lies in different banks, as
// ldmatrix reads them, by an exclusive or. The chunk is even + odd: an even number, best a constant, and 0 or 1, so
// that few different sums are left for registers. Sums are signed, which lets the compiler put their constants into
// instructions; what follows from bits is not.
template <int kChunks>
__device__ inline int chunk_offset(int row, int even, int odd) {
  constexpr unsigned kShared = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
  const unsigned bits = static_cast<unsigned>(row) / (8 / kShared) % kShared ^ static_cast<unsigned>(even) % kShared;
  const unsigned place = kShared == 1 ? odd : bits ^ static_cast<unsigned>(odd);
  return row * (kChunks * 16) + static_cast<int>(place) * 16 + (even - even % static_cast<int>(kShared)) * 16;
}

template <int kChunks>
__device__ inline int chunk_offset(int row, int chunk) {
  return chunk_offset<kChunks>(row, chunk & ~1, chunk & 1);
}

// The same for kRows rows of prefill. Rows of whole 128 bytes lie in panels of 64 columns, one behind the other, which
// is the 128-byte swizzle of wgmma's matrices.
template <int kChunks, int kRows>
__device__ inline int panel_offset(int row, int even, int odd) {
  if constexpr (kChunks % 8 != 0) return chunk_offset<kChunks>(row, even, odd);
  return even / 8 * (kRows * 128) + chunk_offset<8>(row, even % 8, odd);
}

template <int kChunks, int kRows>
__device__ inline int panel_offset(int row, int chunk) {
  return panel_offset<kChunks, kRows>(row, chunk & ~1, chunk & 1);
}

// A KV head's row of one position as the cache has it. In shared memory it takes whole chunks.
template <CacheQuantization kKind, int kHeadDim>
struct CacheRow {
  static constexpr bool kInt4 = kKind == CacheQuantization::kInt4;
  static constexpr bool kScaled = kKind == CacheQuantization::kInt8 || kKind == CacheQuantization::kFp8;
  static constexpr int kBytes = kKind == CacheQuantization::kNone ? kHeadDim * 2 : kInt4 ? kHeadDim / 2 : kHeadDim;
  static constexpr int kChunks = (kBytes + 15) / 16;
  static constexpr int kTileBytes = kv_tile(kHeadDim) * kChunks * 16;
  // Words of scales, and from row to row of them: eight rows' words of one group lie in different banks.
  static constexpr int kKeyScales = kInt4 ? int4_groups(kHeadDim, kInt4KeyGroup) : kScaled ? 1 : 0;
  static constexpr int kValueScales = kInt4 ? int4_groups(kHeadDim, kInt4ValueGroup) : kScaled ? 1 : 0;
  static constexpr int kKeyStride = kKeyScales % 8 == 0 && kInt4 ? kKeyScales + 4 : kKeyScales;
  static constexpr int kScaleBytes = kv_tile(kHeadDim) * (kKeyStride + kValueScales) * 4;
  static constexpr int kStageBytes = 2 * kTileBytes + kScaleBytes;
};

// A stage: the tile of K, that of V, and their scales, which may lie apart.
template <CacheQuantization kKind, int kHeadDim>
struct Stage {
  using Row = CacheRow<kKind, kHeadDim>;
  unsigned char* memory;
  unsigned char* scales;

  __device__ static Stage whole(unsigned char* memory) {
    return {memory, memory + 2 * Row::kTileBytes};
  }
  __device__ unsigned char* keys() const {
    return memory;
  }
  __device__ unsigned char* values() const {
    return memory + Row::kTileBytes;
  }
  __device__ uint32_t* key_scales() const {
    return reinterpret_cast<uint32_t*>(scales);
  }
  __device__ uint32_t* value_scales() const {
    return key_scales() + kv_tile(kHeadDim) * Row::kKeyStride;
  }
};

// Copies tiles of one KV head of one sequence, one after another. Positions that no row sees are not read: they become
// zeros. kUnroll: copies of a lane at once.
template <CacheQuantization kKind, int kHeadDim, int kUnroll = 2>
class TileLoader {
  using Row = CacheRow<kKind, kHeadDim>;
  static constexpr int kTile = kv_tile(kHeadDim);
  static constexpr int kRows = kTile / kAttentionWarps;  // rows of a tile that a warp copies

 public:
  __device__ explicit TileLoader(const PagedAttentionParams& p) : p_(p) {}

  __device__ void begin(const WorkItem& item) {
    head_ = item.at.head;
    table_row_ = p_.table_row(item.at.seq, head_);
    kv_begin_ = item.rows.kv_begin, kv_end_ = item.rows.kv_end;
    tile_ = item.rows.first_kv_tile + item.at.kv_tile, end_ = tile_ + item.tiles;
    find_slot();
  }

  // The present tile, counted from position 0.
  __device__ int tile() const {
    return tile_;
  }
  __device__ bool ended() const {
    return tile_ >= end_;
  }
  // The next tile's pages are read one tile ahead, and not used before: the table's latency is hidden.
  __device__ void next() {
    ++tile_;
    find_slot();
  }

  // Start the copy of the present tile, or of its K or V alone.
  __device__ void copy(const Stage<kKind, kHeadDim>& to) const {
    if constexpr (kKind == CacheQuantization::kNone && Row::kChunks % 8 == 0) {
      copy_eights<false>(p_.k_cache, to.keys());
      copy_eights<false>(p_.v_cache, to.values());
      return;
    }
    for_each_chunk<Row::kBytes>([&](int row, int byte, int64_t offset, bool valid) {
      const int place = chunk_offset<Row::kChunks>(row, byte / 16) + byte % 16;
      copy_chunk<kChunkOf<Row::kBytes>>(to.keys() + place, p_.k_cache, offset, valid);
      copy_chunk<kChunkOf<Row::kBytes>>(to.values() + place, p_.v_cache, offset, valid);
    });
    if constexpr (Row::kInt4) {
      copy_int4_scales<Row::kKeyScales * 4, Row::kKeyStride>(p_.k_scale, to.key_scales());
      copy_int4_scales<Row::kValueScales * 4, Row::kValueScales>(p_.v_scale, to.value_scales());
    } else if constexpr (Row::kScaled) {
      copy_scales(to);
    }
  }
  __device__ void copy_floats(const void* cache, unsigned char* to) const {
    for_each_chunk<Row::kBytes>([&](int row, int byte, int64_t offset, bool valid) {
      cp_async(to + chunk_offset<Row::kChunks>(row, byte / 16), static_cast<const unsigned char*>(cache) + offset,
               valid);
    });
  }
  // The same to the places of prefill.
  __device__ void copy_panels(const void* cache, unsigned char* to) const {
    if constexpr (Row::kChunks % 8 == 0) {
      copy_eights<true>(cache, to);
    } else {
      copy_floats(cache, to);
    }
  }

 private:
  // Finds the page of this lane's position in the present tile, and the position in it.
  __device__ void find_slot() {
    const int lane = static_cast<int>(threadIdx.x % kWarpSize);
    const int position = tile_ * kTile + warp_row() + lane, size = p_.block_size;
    page_ = 0, in_page_ = -1;
    if (lane >= kRows || tile_ >= end_ || position < kv_begin_ || position >= kv_end_) return;
    const int number = quotient(position, size);
    page_ = p_.block_table[table_row_ * p_.max_blocks + number];
    in_page_ = position - number * size;
  }

  // Rows of whole 128 bytes, of decode or in the panels of prefill: a lane's copies differ by constants.
  template <bool kPanels>
  __device__ void copy_eights(const void* cache, unsigned char* to) const {
    constexpr int kChunks = Row::kChunks, kLanes = kChunks < kWarpSize ? kChunks : kWarpSize;
    constexpr int kRowBytes = kPanels ? 128 : kChunks * 16, kEightBytes = kPanels ? kTile * 128 : 128;
    static_assert(kWarpSize % kLanes == 0);
    const int lane = static_cast<int>(opaque(threadIdx.x) % kWarpSize), lane_row = lane / kLanes,
              lane_chunk = lane % kLanes, slot_bytes = Row::kBytes * p_.kv_heads;
    const auto* const from = opaque(static_cast<const unsigned char*>(cache) + (head_ * Row::kBytes + lane_chunk * 16));
    const int row0 = warp_row() + lane_row, own_slot = this->slot();
    const int place =
        kPanels ? panel_offset<kChunks, kTile>(row0, lane_chunk) : chunk_offset<kChunks>(row0, lane_chunk);
#pragma unroll
    for (int row = 0; row < kRows; row += kWarpSize / kLanes) {
      const int slot = __shfl_sync(kFullMask, own_slot, row + lane_row);
      for (int chunk = 0; chunk < kChunks; chunk += kLanes) {
        cp_async(to + row * kRowBytes + chunk / 8 * kEightBytes + (place ^ row % 8 * 16),
                 from + (int64_t{slot} * slot_bytes + chunk * 16), slot >= 0);
      }
    }
  }

  // The cache's row of this lane's position, negative for none.
  __device__ int slot() const {
    return in_page_ < 0 ? -1 : page_ * p_.block_size + in_page_;
  }

  __device__ static int warp_row() {
    return static_cast<int>(opaque(threadIdx.x) / kWarpSize) * kRows;
  }

  template <int kBytes>
  static constexpr int kChunkOf = kBytes % 16 == 0  ? 16
                                  : kBytes % 8 == 0 ? 8
                                                    : 4;

  // Calls fn(row, byte, offset, valid) for each chunk of the warp's rows of kBytes; it lies at `offset` in the cache.
  template <int kBytes, class Fn>
  __device__ void for_each_chunk(const Fn& fn) const {
    constexpr int kChunk = kChunkOf<kBytes>, kChunks = kBytes / kChunk, kCount = kRows * kChunks;
    const int slot_bytes = kBytes * p_.kv_heads;
    // Opaque: what follows from them is made again for each tile, instead of kept in registers.
    const unsigned lane = opaque(threadIdx.x) % kWarpSize;
    const int head_bytes = static_cast<int>(opaque(head_)) * kBytes, first_row = warp_row(), own_slot = this->slot();
#pragma unroll kUnroll
    for (unsigned first = 0; first < kCount; first += kWarpSize) {
      const unsigned i = first + lane;
      const int row = static_cast<int>(i / kChunks), byte = static_cast<int>(i % kChunks * kChunk);
      const int slot = __shfl_sync(kFullMask, own_slot, row);
      if (kCount % kWarpSize != 0 && i >= kCount) continue;
      fn(first_row + row, byte, int64_t{max(slot, 0)} * slot_bytes + (head_bytes + byte), slot >= 0);
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

  template <int kBytes, int kStride>
  __device__ void copy_int4_scales(const void* scales, uint32_t* to) const {
    for_each_chunk<kBytes>([&](int row, int byte, int64_t offset, bool valid) {
      copy_chunk<kChunkOf<kBytes>>(to + row * kStride + byte / 4, scales, offset, valid);
    });
  }

  __device__ void copy_scales(const Stage<kKind, kHeadDim>& to) const {
    const unsigned thread = opaque(threadIdx.x), lane = thread % kWarpSize;
    if (lane >= kRows) return;
    const int slot = this->slot();
    const int64_t offset = slot >= 0 ? int64_t{slot} * p_.kv_heads + head_ : 0;
    const unsigned row = thread / kWarpSize * kRows + lane;
    cp_async_small<4>(to.key_scales() + row, static_cast<const float*>(p_.k_scale) + offset, slot >= 0);
    cp_async_small<4>(to.value_scales() + row, static_cast<const float*>(p_.v_scale) + offset, slot >= 0);
  }

  const PagedAttentionParams& p_;
  int table_row_ = 0, head_ = 0, kv_begin_ = 0, kv_end_ = 0;
  int tile_ = 0, end_ = 0;
  int page_ = 0, in_page_ = -1;  // of this lane's position in the present tile; -1 for none
};

}  // namespace fastinfer::cuda
