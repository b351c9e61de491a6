#include "attention/paged_attention.h"

#include <cfloat>
#include <cstdint>

#include "attention/kv_cache_binding.h"
#include "attention/paged_attention_plan.h"
#include "binding/batch_invariant.h"
#include "binding/output.h"
#include "binding/prompt_rows.h"

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

// Values within the keys are a view of the first elements of each.
void check_values(const Checks& check, const Tensor& k_cache, const Tensor& v_cache,
                  const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                  const PagedAttentionParams& p) {
  check.contiguous(k_cache, "k_cache");
  check.dtype(v_cache, "v_cache", k_cache.scalar_type());
  if (!p.values_in_keys()) return check.contiguous(v_cache, "v_cache");
  bool view = v_cache.data_ptr() == k_cache.data_ptr();
  for (int64_t i = 0; i < 4; ++i) {
    view = view && (v_cache.stride(i) == k_cache.stride(i) || v_cache.size(i) == 1 || v_cache.numel() == 0);
  }
  check.require(view, "v_cache must have the shape of k_cache, ", format_shape(k_cache.sizes()),
                ", or be a view of its first columns, got ", format_shape(v_cache.sizes()), " elsewhere");
  check.require(cache_quantization(k_cache) != CacheQuantization::kInt4,
                "v_cache must be apart from k_cache for a cache of uint8 (int4), got its first columns");
  check.require(!k_scale || !v_scale || k_scale->data_ptr() == v_scale->data_ptr(),
                "v_scale must be k_scale where v_cache is part of k_cache, got another tensor");
}

// Sets cache_dtype or quantization, and the scales.
void check_cache(const Checks& check, const Tensor& k_cache, const Tensor& v_cache,
                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, PagedAttentionParams& p) {
  check_values(check, k_cache, v_cache, k_scale, v_scale, p);
  p.quantization = cache_quantization(k_cache);
  p.k_scale = cache_scales(check, k_scale, "k_scale", k_cache, p.head_dim, kInt4KeyGroup);
  p.v_scale = cache_scales(check, v_scale, "v_scale", v_cache, p.head_dim, kInt4ValueGroup);
  const bool quantized = p.quantization != CacheQuantization::kNone;
  p.cache_dtype = quantized ? p.dtype : check.float_dtype(k_cache, "k_cache");
}

// Rejects arguments that the CUDA kernels do not support.
void check_cuda(const Checks& check, const Tensor& q, const PagedAttentionParams& p) {
  check.require(p.dtype != DType::kFloat32, "q must be bfloat16 or float16 on CUDA, got float32");
  check.require(p.cache_dtype == p.dtype, "k_cache must be int8, float8_e4m3fn, uint8 (int4) or, as q, ",
                name(q.scalar_type()), " on CUDA");
  for (const void* pages : {p.k_cache, p.v_cache}) {
    check.require(reinterpret_cast<uintptr_t>(pages) % 16 == 0, "k_cache and v_cache must be aligned to 16 bytes");
  }
  for (const void* scales : {p.k_scale, p.v_scale}) {
    check.require(reinterpret_cast<uintptr_t>(scales) % 16 == 0, "k_scale and v_scale must be aligned to 16 bytes");
  }
  check.require(reinterpret_cast<uintptr_t>(p.out) % 16 == 0, "out must be aligned to 16 bytes");
  const bool latents = cuda::has_latents(p.head_dim);
  check.require(
      p.values_in_keys() == latents && p.value_dim == cuda::value_columns(p.head_dim),
      "v_cache must be the first 256 of 320 or 512 of 576 columns of k_cache on CUDA, or have its shape, got ",
      p.value_dim, " of ", p.head_dim);
  check.require(!latents || p.quantization == CacheQuantization::kNone,
                "k_cache must have the dtype of q where v_cache is part of it on CUDA");
}

// The CPU can look into the ragged description, and says what is wrong with it.
void check_lengths(const Checks& check, const PagedAttentionParams& p, int64_t tokens) {
  check.require(p.query_start[0] == 0 && p.query_start[p.seqs] == tokens,
                "query_start must run from 0 to the number of tokens, ", tokens, ", got ", p.query_start[0], " to ",
                p.query_start[p.seqs]);
  const int64_t capacity = p.max_blocks * p.block_size;
  const int heads = p.table_per_head ? p.kv_heads : 1;
  for (int64_t seq = 0; seq < p.seqs; ++seq) {
    const int64_t queries = int64_t{p.query_start[seq + 1]} - p.query_start[seq];
    check.require(queries >= 0, "query_start must not decrease, got ", p.query_start[seq], " before ",
                  p.query_start[seq + 1]);
    for (int64_t i = seq * heads; i < (seq + 1) * heads; ++i) {
      check.require(p.seq_lens[i] >= 0 && p.seq_lens[i] <= capacity, "seq_lens[", seq, "] must be in 0..", capacity,
                    " (its blocks), got ", p.seq_lens[i]);
    }
  }
}

// From 2^127 on the kernels' softcap * log2(e) would be infinite, and below the smallest normal number its inverse.
float checked_softcap(const Checks& check, double softcap) {
  const auto cap = static_cast<float>(softcap);
  check.require(softcap == 0 || (cap >= FLT_MIN && cap < 0x1p127f),
                "softcap must be 0 (none), or positive, normal and below 2^127 in fp32, got ", softcap);
  return cap;
}

// Longer than any sequence, and no overflow where it is subtracted from a position.
int clamp_window(int64_t window) {
  return static_cast<int>(std::min<int64_t>(window, 1 << 30));
}

// A new work plan, made on the device.
Tensor make_plan(const Tensor& seq_lens, const Tensor& query_start, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                 int64_t window, bool chunked, const cuda::PagedAttentionPlan& launch) {
  Tensor plan = new_tensor(seq_lens, {launch.plan_ints});
  const PagedAttentionPlanParams params{
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .query_start = static_cast<const int32_t*>(query_start.data_ptr()),
      .plan = static_cast<int32_t*>(plan.data_ptr()),
      .seqs = seq_lens.size(0),
      .table_per_head = seq_lens.dim() == 2,
      .q_heads = static_cast<int>(q_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .window = clamp_window(window),
      .chunked = chunked,
      .blocks = static_cast<int>(launch.attention.grid),
      .batch_invariant = batch_invariant(),
  };
  FASTINFER_LAUNCH(seq_lens, paged_attention_plan, params);
  return plan;
}

Tensor paged_attention(const Output& output, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_table, const Tensor& seq_lens, const Tensor& query_start, double scale,
                       int64_t window, double softcap, const std::optional<Tensor>& sinks,
                       const std::optional<Tensor>& lse, const std::optional<Tensor>& k_scale,
                       const std::optional<Tensor>& v_scale, const std::optional<Tensor>& plan, bool chunked) {
  const Checks check("paged_attention", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), q_heads = q.size(1), head_dim = q.size(2);
  const int64_t columns = cache_columns(check, k_cache, "q", head_dim);
  check.shape(k_cache, "k_cache", {kAny, kAny, kAny, columns});
  const int64_t num_blocks = k_cache.size(0), block_size = k_cache.size(1), kv_heads = k_cache.size(2);
  check.shape(v_cache, "v_cache", {num_blocks, block_size, kv_heads, kAny});
  const int64_t value_dim = v_cache.size(3) == columns ? head_dim : v_cache.size(3);
  check.require(value_dim > 0 && value_dim <= head_dim, "v_cache must have 1 to ", columns, " columns, got ",
                v_cache.size(3));
  const bool table_per_head = block_table.dim() == 3;
  if (table_per_head) {
    check.shape(block_table, "block_table", {kAny, kv_heads, kAny});
  } else {
    check.shape(block_table, "block_table", {kAny, kAny});
  }
  const int64_t seqs = block_table.size(0);
  if (table_per_head) {
    check.shape(seq_lens, "seq_lens", {seqs, kv_heads});
  } else {
    check.shape(seq_lens, "seq_lens", {seqs});
  }
  check.shape(query_start, "query_start", {seqs + 1});
  check.require(kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0, "q must have a multiple of k_cache's ",
                kv_heads, " heads, got ", q_heads);
  check.require(head_dim > 0 && block_size > 0, "k_cache must have a block size and a head size, got ",
                format_shape(k_cache.sizes()));
  check.require(window >= 0, "window must be 0 (none) or positive, got ", window);
  for (const auto& [t, name] :
       {std::pair{&block_table, "block_table"}, {&seq_lens, "seq_lens"}, {&query_start, "query_start"}}) {
    check.dtype(*t, name, ScalarType::Int);
    check.contiguous(*t, name);
  }
  check.rows_contiguous(q, "q");
  const Tensor out = output.tensor(check, q, {tokens, q_heads, value_dim});
  PagedAttentionParams params{
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
      .max_blocks = block_table.size(table_per_head ? 2 : 1),
      .num_blocks = num_blocks,
      .block_size = static_cast<int>(block_size),
      .q_heads = static_cast<int>(q_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .value_dim = static_cast<int>(value_dim),
      .window = clamp_window(window),
      .chunked = chunked,
      .scale = static_cast<float>(scale),
      .softcap = checked_softcap(check, softcap),
      .dtype = check.float_dtype(q, "q"),
      .table_per_head = table_per_head,
      .m = tokens,
      .first_prompt_row = first_prompt_row(),
  };
  check_cache(check, k_cache, v_cache, k_scale, v_scale, params);
  const cuda::Device* const gpu = gpu_of(q);
  if (gpu == nullptr) {
    check_lengths(check, params, tokens);
    FASTINFER_LAUNCH(q, paged_attention, params);
    return out;
  }
  check_cuda(check, q, params);
  if (tokens == 0) return out;
  const auto launch = cuda::plan_paged_attention(seq_lens.numel(), head_dim, *gpu);
  if (plan) {
    check.shape(*plan, "plan", {launch.plan_ints});
    check.dtype(*plan, "plan", ScalarType::Int);
    check.contiguous(*plan, "plan");
    check.require(reinterpret_cast<uintptr_t>(plan->data_ptr()) % 16 == 0, "plan must be aligned to 16 bytes");
  }
  const Tensor steps =
      plan ? *plan : make_plan(seq_lens, query_start, q_heads, kv_heads, head_dim, window, chunked, launch);
  const Tensor workspace = new_tensor(q, {launch.workspace_bytes}, ScalarType::Byte);
  params.plan = static_cast<int32_t*>(steps.data_ptr());
  params.workspace = static_cast<float*>(workspace.data_ptr());
  params.blocks = static_cast<int>(launch.attention.grid);
  FASTINFER_LAUNCH(q, paged_attention, params);
  return out;
}

Tensor paged_attention_plan(const Tensor& seq_lens, const Tensor& query_start, int64_t q_heads, int64_t kv_heads,
                            int64_t head_dim, int64_t window, bool chunked) {
  const Checks check("paged_attention_plan", seq_lens);
  if (seq_lens.dim() == 2) {
    check.shape(seq_lens, "seq_lens", {kAny, kv_heads});
  } else {
    check.shape(seq_lens, "seq_lens", {kAny});
  }
  check.shape(query_start, "query_start", {seq_lens.size(0) + 1});
  check.dtype(seq_lens, "seq_lens", ScalarType::Int);
  check.dtype(query_start, "query_start", ScalarType::Int);
  check.contiguous(seq_lens, "seq_lens");
  check.contiguous(query_start, "query_start");
  check.require(kv_heads > 0 && q_heads > 0 && q_heads <= INT32_MAX && q_heads % kv_heads == 0,
                "q_heads must be a multiple of kv_heads, ", kv_heads, ", and at most ", INT32_MAX, ", got ", q_heads);
  check.require(window >= 0, "window must be 0 (none) or positive, got ", window);
  const cuda::Device* const gpu = gpu_of(seq_lens);
  if (gpu == nullptr) return new_tensor(seq_lens, {0});  // the CPU kernel plans as it goes
  return make_plan(seq_lens, query_start, q_heads, kv_heads, head_dim, window, chunked,
                   cuda::plan_paged_attention(seq_lens.numel(), head_dim, *gpu));
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&paged_attention>(m, "paged_attention");
  m.impl("paged_attention_plan", TORCH_BOX(&paged_attention_plan));
}

}  // namespace fastinfer
