// Keys of the cache in four bits, from which select_pages estimates logits.
//
// A key is multiplied by the Hadamard matrix of the largest power of two that divides head_dim, in runs of that size,
// so that no channel is much larger than the others: a product with a query that is rotated the same way is size times
// the logit. Then each element is rounded to one of 16 levels -7.5, -6.5 .. 7.5, times the key's scale.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastinfer {

inline constexpr int kKeyCodesPerWord = 8;
inline constexpr float kLargestKeyLevel = 7.5f;  // of code 15; code c is level c - 7.5

// Words of one key: its codes, then its scale in fp32. Byte b of word w has the codes of the channels 8 w + b, in its
// lower half, and 8 w + 4 + b.
FASTINFER_HOST_DEVICE constexpr int key_code_words(int head_dim) {
  return head_dim / kKeyCodesPerWord + 1;
}

// Words of the values of a block, see store_value_codes.h: codes [block_size / 8][head_dim], then [block_size] scales.
FASTINFER_HOST_DEVICE constexpr int value_code_words(int head_dim, int block_size) {
  return block_size / kKeyCodesPerWord * head_dim + block_size;
}

FASTINFER_HOST_DEVICE constexpr int hadamard_size(int head_dim) {
  return head_dim & -head_dim;
}

namespace cuda {

inline constexpr int kMaxKeyCodeDim = 512;  // a warp rotates a row in shared memory

}  // namespace cuda
}  // namespace fastinfer
