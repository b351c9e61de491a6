#include "attention/select_pages.h"

#include <cstdint>
#include <optional>
#include <tuple>

#include "attention/ragged_binding.h"
#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

// Tokens of a row see each other's pages but for the last two, which are read in any case.
void check_rows(const Checks& check, const SelectPagesParams& p, int64_t tokens) {
  int64_t seq = 0;
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t begin = p.row_start[row], end = p.row_start[row + 1];
    check.require(begin >= 0 && begin <= end && end <= tokens, "row_start must not decrease within 0..", tokens,
                  ", got ", begin, " before ", end);
    check.require(end - begin <= p.block_size, "a row must have at most ", p.block_size, " tokens (a block), got ",
                  end - begin);
    if (begin == end) continue;
    while (p.query_start[seq + 1] <= begin) ++seq;
    check.require(end <= p.query_start[seq + 1], "a row must have tokens of one sequence, got ", begin, "..", end - 1,
                  ", of which ", p.query_start[seq + 1], " belongs to the next");
  }
}

// Attention to the pages that are not chosen.
struct Rest {
  const Tensor& value_codes;
  const Tensor& out;
  const Tensor& lse;
};

void check_rest(const Checks& check, const Rest& rest, const Tensor& q, const Tensor& codes) {
  check.require(codes.size(3) % kKeyCodesPerWord == 0, "block_size must be a multiple of 8 with value_codes, got ",
                codes.size(3));
  check.shape(rest.value_codes, "value_codes", codes.sizes());
  check.dtype(rest.value_codes, "value_codes", ScalarType::Int);
  check.shape(rest.out, "rest", q.sizes());
  check.dtype(rest.out, "rest", q.scalar_type());
  check.shape(rest.lse, "rest_lse", {q.size(0), q.size(1)});
  check.dtype(rest.lse, "rest_lse", ScalarType::Float);
  for (const auto& [t, name] :
       {std::pair{&rest.value_codes, "value_codes"}, {&rest.out, "rest"}, {&rest.lse, "rest_lse"}}) {
    check.contiguous(*t, name);
  }
}

std::tuple<Tensor, Tensor> select(const Tensor& q, const Tensor& codes, const Tensor& block_table,
                                  const Tensor& seq_lens, const Tensor& query_start, int64_t block_size, double share,
                                  int64_t num_dense_pages, double scale, const std::optional<Tensor>& row_start,
                                  const std::optional<Rest>& rest) {
  const Checks check("select_pages", q);
  check.shape(q, "q", {kAny, kAny, kAny});
  const int64_t tokens = q.size(0), q_heads = q.size(1), head_dim = q.size(2);
  check.require(head_dim > 0 && head_dim % 8 == 0, "q must have a head_dim that is a multiple of 8, got ", head_dim);
  check.require(block_size > 0 && block_size <= INT32_MAX, "block_size must be positive and at most ", INT32_MAX,
                ", got ", block_size);
  check.shape(codes, "codes", {kAny, kAny, key_code_words(static_cast<int>(head_dim)), block_size});
  const int64_t kv_heads = codes.size(1);
  check.require(kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0, "q must have a multiple of codes' ", kv_heads,
                " heads, got ", q_heads);
  check.shape(block_table, "block_table", {kAny, kAny});
  const int64_t seqs = block_table.size(0), max_blocks = block_table.size(1);
  check.shape(seq_lens, "seq_lens", {seqs});
  check.shape(query_start, "query_start", {seqs + 1});
  check.require(share > 0.0 && share <= 1.0, "share must be above 0 and at most 1, got ", share);
  check.require(num_dense_pages >= 0 && num_dense_pages <= INT32_MAX, "num_dense_pages must be in 0..", INT32_MAX,
                ", got ", num_dense_pages);
  check.dtype(codes, "codes", ScalarType::Int);
  check.contiguous(codes, "codes");
  for (const auto& [t, name] :
       {std::pair{&block_table, "block_table"}, {&seq_lens, "seq_lens"}, {&query_start, "query_start"}}) {
    check.dtype(*t, name, ScalarType::Int);
    check.contiguous(*t, name);
  }
  check.rows_contiguous(q, "q");
  int64_t rows = tokens;
  if (row_start) {
    check.shape(*row_start, "row_start", {kAny});
    check.dtype(*row_start, "row_start", ScalarType::Int);
    check.contiguous(*row_start, "row_start");
    rows = row_start->size(0) - 1;
    check.require(rows >= 0, "row_start must have a start and an end, got no element");
  }
  if (rest) check_rest(check, *rest, q, codes);
  const Tensor pages = new_tensor(block_table, {rows, kv_heads, max_blocks});
  const Tensor lens = new_tensor(block_table, {rows, kv_heads});
  SelectPagesParams params{
      .q = q.data_ptr(),
      .codes = static_cast<const uint32_t*>(codes.data_ptr()),
      .block_table = static_cast<const int32_t*>(block_table.data_ptr()),
      .seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr()),
      .query_start = static_cast<const int32_t*>(query_start.data_ptr()),
      .row_start = row_start ? static_cast<const int32_t*>(row_start->data_ptr()) : nullptr,
      .value_codes = rest ? static_cast<const uint32_t*>(rest->value_codes.data_ptr()) : nullptr,
      .rest = rest ? rest->out.data_ptr() : nullptr,
      .rest_lse = rest ? static_cast<float*>(rest->lse.data_ptr()) : nullptr,
      .pages = static_cast<int32_t*>(pages.data_ptr()),
      .lens = static_cast<int32_t*>(lens.data_ptr()),
      .rows = rows,
      .seqs = seqs,
      .q_stride = q.stride(0),
      .max_blocks = max_blocks,
      .num_blocks = codes.size(0),
      .share = share,
      .num_dense_pages = static_cast<int>(num_dense_pages),
      .block_size = static_cast<int>(block_size),
      .q_heads = static_cast<int>(q_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .scale = static_cast<float>(scale),
      .dtype = check.float_dtype(q, "q"),
  };
  if (const cuda::Device* const gpu = gpu_of(q)) {
    check.require(!row_start, "row_start must be None on CUDA: each token chooses for itself");
    check.require(!rest, "value_codes must be None on CUDA");
    params.plan = cuda::plan_select_pages(tokens, params.q_heads, params.kv_heads, params.head_dim, params.block_size,
                                          max_blocks, *gpu);
    const Tensor workspace = new_tensor(q, {tokens, q_heads, max_blocks}, ScalarType::Float);
    params.workspace = static_cast<float*>(workspace.data_ptr());
    params.arrived = arrival_counters(q, tokens * kv_heads);
    FASTINFER_LAUNCH(q, select_pages, params);
    return {pages, lens};
  }
  check_ragged(check, params.query_start, params.seq_lens, seqs, tokens, max_blocks * block_size);
  if (row_start) check_rows(check, params, tokens);
  FASTINFER_LAUNCH(q, select_pages, params);
  return {pages, lens};
}

std::tuple<Tensor, Tensor> select_pages(const Tensor& q, const Tensor& codes, const Tensor& block_table,
                                        const Tensor& seq_lens, const Tensor& query_start, int64_t block_size,
                                        double share, int64_t num_dense_pages, double scale,
                                        const std::optional<Tensor>& row_start) {
  return select(q, codes, block_table, seq_lens, query_start, block_size, share, num_dense_pages, scale, row_start, {});
}

std::tuple<Tensor, Tensor> select_pages_and_rest(const Tensor& q, const Tensor& codes, const Tensor& block_table,
                                                 const Tensor& seq_lens, const Tensor& query_start, int64_t block_size,
                                                 double share, int64_t num_dense_pages, double scale,
                                                 const Tensor& value_codes, const Tensor& rest,
                                                 const Tensor& rest_lse) {
  return select(q, codes, block_table, seq_lens, query_start, block_size, share, num_dense_pages, scale, {},
                Rest{value_codes, rest, rest_lse});
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("select_pages", TORCH_BOX(&select_pages));
  m.impl("select_pages.rest", TORCH_BOX(&select_pages_and_rest));
}

}  // namespace fastinfer
