#include "attention/select_tokens.h"

#include <cstdint>
#include <tuple>

#include "attention/ragged_binding.h"
#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

std::tuple<Tensor, Tensor> select_tokens(const Tensor& q, const Tensor& weights, const Tensor& keys,
                                         const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start,
                                         int64_t top_k) {
  const Checks check("select_tokens", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), heads = q.size(1), head_dim = q.size(2);
  check.require(heads > 0 && head_dim > 0, "q must have a head and an element, got ", format_shape(q.sizes()));
  const DType dtype = check.float_dtype(q, "q");
  check.shape(weights, "weights", {tokens, heads});
  check.dtype(weights, "weights", q.scalar_type());
  check.shape(keys, "keys", {kAny, kAny, 1, head_dim});
  const int64_t num_blocks = keys.size(0), block_size = keys.size(1);
  check.require(block_size > 0, "keys must have a slot in each block, got ", format_shape(keys.sizes()));
  check.require(num_blocks <= INT32_MAX / block_size, "keys must have at most ", INT32_MAX, " slots, got ",
                format_shape(keys.sizes()));
  check.shape(block_table, "block_table", {kAny, kAny});
  const int64_t seqs = block_table.size(0), max_blocks = block_table.size(1);
  check.shape(seq_lens, "seq_lens", {seqs});
  check.shape(query_start, "query_start", {seqs + 1});
  check.require(top_k > 0 && top_k <= INT32_MAX, "top_k must be positive and at most ", INT32_MAX, ", got ", top_k);
  check.contiguous(keys, "keys");
  for (const auto& [t, name] :
       {std::pair{&block_table, "block_table"}, {&seq_lens, "seq_lens"}, {&query_start, "query_start"}}) {
    check.dtype(*t, name, ScalarType::Int);
    check.contiguous(*t, name);
  }
  check.rows_contiguous(q, "q");
  check.rows_contiguous(weights, "weights");
  const int64_t width = std::min(top_k, max_blocks * block_size);
  const Tensor slots = new_tensor(block_table, {tokens, width}), lens = new_tensor(block_table, {tokens});
  SelectTokensParams params{
      .q = q.data_ptr(),
      .weights = weights.data_ptr(),
      .keys = keys.data_ptr(),
      .block_table = static_cast<const int32_t*>(block_table.data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .query_start = static_cast<const int32_t*>(query_start.data_ptr()),
      .slots = static_cast<int32_t*>(slots.data_ptr()),
      .lens = static_cast<int32_t*>(lens.data_ptr()),
      .tokens = tokens,
      .seqs = seqs,
      .q_stride = q.stride(0),
      .weight_stride = weights.stride(0),
      .max_blocks = max_blocks,
      .num_blocks = num_blocks,
      .width = static_cast<int>(width),
      .block_size = static_cast<int>(block_size),
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .dtype = dtype,
      .key_dtype = check.float_dtype(keys, "keys"),
  };
  if (const cuda::Device* const gpu = gpu_of(q)) {
    check.require(dtype != DType::kFloat32, "q must be bfloat16 or float16 on CUDA, got float32");
    check.require(params.key_dtype == dtype, "keys must be, as q, ", name(q.scalar_type()), " on CUDA, got ",
                  name(keys.scalar_type()));
    check.require(reinterpret_cast<uintptr_t>(params.keys) % 16 == 0, "keys must be aligned to 16 bytes");
    params.plan = cuda::plan_select_tokens(tokens, params.heads, params.head_dim, max_blocks * block_size, width, *gpu);
    const Tensor workspace = new_tensor(block_table, {params.plan.group * params.plan.stride});
    params.workspace = static_cast<uint32_t*>(workspace.data_ptr());
    FASTINFER_LAUNCH(q, select_tokens, params);
    return {slots, lens};
  }
  check_ragged(check, params.query_start, params.seq_lens, seqs, tokens, max_blocks * block_size);
  FASTINFER_LAUNCH(q, select_tokens, params);
  return {slots, lens};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("select_tokens", TORCH_BOX(&select_tokens));
}

}  // namespace fastinfer
