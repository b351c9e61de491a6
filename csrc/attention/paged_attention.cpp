#include "attention/paged_attention.h"

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

const float* optional_floats(const Checks& check, const std::optional<Tensor>& t, const char* name,
                             std::initializer_list<int64_t> shape) {
  if (!t) return nullptr;
  check.shape(*t, name, shape);
  check.dtype(*t, name, ScalarType::Float);
  check.contiguous(*t, name);
  return static_cast<const float*>(t->data_ptr());
}

// The CPU can look into the ragged description, and says what is wrong with it.
void check_lengths(const Checks& check, const PagedAttentionParams& p, int64_t tokens) {
  check.require(p.query_start[0] == 0 && p.query_start[p.seqs] == tokens,
                "query_start must run from 0 to the number of tokens, ", tokens, ", got ", p.query_start[0], " to ",
                p.query_start[p.seqs]);
  for (int64_t seq = 0; seq < p.seqs; ++seq) {
    const int64_t queries = int64_t{p.query_start[seq + 1]} - p.query_start[seq];
    check.require(queries >= 0, "query_start must not decrease, got ", p.query_start[seq], " before ",
                  p.query_start[seq + 1]);
    const int64_t capacity = p.max_blocks * p.block_size;
    check.require(p.seq_lens[seq] >= queries && p.seq_lens[seq] <= capacity, "seq_lens[", seq, "] must be in ", queries,
                  "..", capacity, " (its queries .. its blocks), got ", p.seq_lens[seq]);
  }
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                       const Tensor& seq_lens, const Tensor& query_start, double scale, int64_t window, double softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> lse) {
  const Checks check("paged_attention", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), q_heads = q.size(1), head_dim = q.size(2);
  check.shape(k_cache, "k_cache", {kAny, kAny, kAny, head_dim});
  const int64_t num_blocks = k_cache.size(0), block_size = k_cache.size(1), kv_heads = k_cache.size(2);
  check.shape(v_cache, "v_cache", {num_blocks, block_size, kv_heads, head_dim});
  check.shape(block_table, "block_table", {kAny, kAny});
  const int64_t seqs = block_table.size(0);
  check.shape(seq_lens, "seq_lens", {seqs});
  check.shape(query_start, "query_start", {seqs + 1});
  check.require(kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0, "q must have a multiple of k_cache's ",
                kv_heads, " heads, got ", q_heads);
  check.require(head_dim > 0 && block_size > 0, "k_cache must have a block size and a head size, got ",
                format_shape(k_cache.sizes()));
  check.require(window >= 0, "window must be 0 (none) or positive, got ", window);
  check.require(softcap >= 0, "softcap must be 0 (none) or positive, got ", softcap);
  const DType dtype = check.float_dtype(q, "q"), cache_dtype = check.float_dtype(k_cache, "k_cache");
  check.dtype(v_cache, "v_cache", k_cache.scalar_type());
  check.dtype(block_table, "block_table", ScalarType::Int);
  check.dtype(seq_lens, "seq_lens", ScalarType::Int);
  check.dtype(query_start, "query_start", ScalarType::Int);
  check.rows_contiguous(q, "q");
  check.contiguous(k_cache, "k_cache");
  check.contiguous(v_cache, "v_cache");
  check.contiguous(block_table, "block_table");
  check.contiguous(seq_lens, "seq_lens");
  check.contiguous(query_start, "query_start");
  Tensor out = torch::stable::new_empty(q, {tokens, q_heads, head_dim});
  const PagedAttentionParams params{
      .q = q.data_ptr(),
      .k_cache = k_cache.data_ptr(),
      .v_cache = v_cache.data_ptr(),
      .block_table = static_cast<const int32_t*>(block_table.data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .query_start = static_cast<const int32_t*>(query_start.data_ptr()),
      .sinks = optional_floats(check, sinks, "sinks", {q_heads}),
      .lse = const_cast<float*>(optional_floats(check, lse, "lse", {tokens, q_heads})),
      .out = out.data_ptr(),
      .seqs = seqs,
      .q_stride = q.stride(0),
      .max_blocks = block_table.size(1),
      .num_blocks = num_blocks,
      .block_size = static_cast<int>(block_size),
      .q_heads = static_cast<int>(q_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .window = static_cast<int>(std::min<int64_t>(window, INT32_MAX)),
      .scale = static_cast<float>(scale),
      .softcap = static_cast<float>(softcap),
      .dtype = dtype,
      .cache_dtype = cache_dtype,
  };
  check_lengths(check, params, tokens);
  cpu::paged_attention(params);
  return out;
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace fastinfer
