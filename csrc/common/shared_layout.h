// Layouts of rows in a GPU's shared memory that avoid bank conflicts. 32 banks of four bytes each serve a warp's
// 4-byte accesses at once, 8-byte ones by half warps, 16-byte ones by quarters. tests/emulation/traffic.py counts.
#pragma once

#include "common/dtype.h"

namespace fastinfer::cuda {

// Bytes from row to row of 16-bit values, a multiple of 64 of them, that are read 8 bytes at a time by four lanes from
// each of four rows: 32 modulo 128.
FASTINFER_HOST_DEVICE constexpr int shared_row_bytes(int inputs) {
  return inputs * 2 + 32;
}

// Rows of 64 bytes or a multiple of 128, of which ldmatrix reads 16 bytes each of eight: the place of
// 16 bytes within a row depends on the row. A byte's place is its offset, exclusive or this.
FASTINFER_HOST_DEVICE constexpr int matrix_swizzle(int row_bytes, int row) {
  return row_bytes == 64 ? (row & 6) << 3 : (row & 7) << 4;
}

// Rows of 128 bytes, of which ldmatrix reads 16 bytes each of eight, or four lanes 8 bytes each of four: the same for
// both.
FASTINFER_HOST_DEVICE constexpr int pair_swizzle(int row) {
  return (row & 3) << 5 | (row & 4) << 2;
}

// Rows of `count` sums of four bytes, written as mma leaves them and read eight at a time: first the fours that begin
// each eight, then, four sums further on, those that end them. So what neighbouring lanes read is one run, also of
// global memory.
FASTINFER_HOST_DEVICE constexpr int split_half(int count) {
  return count / 2 + 4;
}
// The place of four of the eight sums from i on: `part` is 0 or 1.
FASTINFER_HOST_DEVICE constexpr int split_four(int count, int i, int part) {
  return i / 2 + part * split_half(count);
}
FASTINFER_HOST_DEVICE constexpr int split_place(int count, int i) {
  return i % 8 / 4 * split_half(count) + i / 8 * 4 + i % 4;
}

}  // namespace fastinfer::cuda
