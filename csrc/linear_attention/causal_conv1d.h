// Depthwise causal convolution over the tokens of each sequence, and SiLU:
// out[t, c] = silu(bias[c] + sum over j of weight[c, j] x[t - kernel + 1 + j, c]);
// or with gates, without SiLU, of their product u[t, c] = gates[t, c] x[t, c], rounded to x's dtype:
// out[t, c] = gates[t, dim + c] (bias[c] + sum over j of weight[c, j] u[t - kernel + 1 + j, c]).
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "linear_attention/state_slots.h"

namespace fastinfer {

struct CausalConv1dParams {
  const void* x;       // [tokens, dim], tokens x_stride elements apart
  const void* weight;  // [dim, kernel]
  const void* bias;    // [dim] or null
  const void* gates;   // [tokens, 2 * dim], tokens gates_stride elements apart; or null
  void* state;         // [slots, kernel - 1, dim]: the inputs x or u before a token, the oldest first
  void* out;           // [tokens, dim]
  StateSlots slots;
  int64_t tokens;
  int64_t dim;
  int64_t kernel;  // 2 to 4, or 7
  int64_t x_stride;
  int64_t gates_stride;
  DType dtype;         // of x, gates, state and out
  DType weight_dtype;  // of weight and bias
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(causal_conv1d, CausalConv1dParams)

namespace fastinfer::cuda {
FASTINFER_API void causal_conv1d(const CausalConv1dParams& params, void* stream);
}
