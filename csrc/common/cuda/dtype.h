// The CUDA side of common/dtype.h: the toolkit's 16-bit types, conversions, and dispatch from a run-time dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/dtype.h"

namespace fastinfer::cuda {

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}

template <class T>
__device__ T from_float(float value);

template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

// Calls fn with a value of the C++ type that stands for `dtype`.
template <class Fn>
void dispatch_cuda(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16: return fn(__nv_bfloat16{});
    case DType::kFloat16: return fn(__half{});
    default: return fn(float{});
  }
}

}  // namespace fastinfer::cuda
