#include "attention/merge_attention_states.h"

#include <tuple>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void merge(const Tensor& a, const Tensor& a_lse, const Tensor& b, const Tensor& b_lse, const Tensor& out,
           const Tensor& out_lse) {
  const Checks check("merge_attention_states", a);
  check.shape(a, "a", {kAny, kAny, kAny});
  const int64_t tokens = a.size(0), heads = a.size(1), head_dim = a.size(2);
  const DType dtype = check.float_dtype(a, "a");
  check.shape(b, "b", {tokens, heads, head_dim});
  check.dtype(b, "b", a.scalar_type());
  check.contiguous(a, "a");
  check.contiguous(b, "b");
  for (const auto& [lse, name] : {std::pair{&a_lse, "a_lse"}, {&b_lse, "b_lse"}}) {
    check.shape(*lse, name, {tokens, heads});
    check.dtype(*lse, name, ScalarType::Float);
    check.contiguous(*lse, name);
  }
  check.require(head_dim > 0 || tokens * heads == 0, "a must have a head_dim, got ", format_shape(a.sizes()));
  const MergeAttentionStatesParams params{
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .a_lse = static_cast<const float*>(a_lse.data_ptr()),
      .b_lse = static_cast<const float*>(b_lse.data_ptr()),
      .out = out.data_ptr(),
      .out_lse = static_cast<float*>(out_lse.data_ptr()),
      .rows = tokens * heads,
      .columns = head_dim,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(a, merge_attention_states, params);
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& a, const Tensor& a_lse, const Tensor& b,
                                                  const Tensor& b_lse) {
  Tensor out = new_tensor(a, a.sizes()), out_lse = new_tensor(a_lse, a_lse.sizes());
  merge(a, a_lse, b, b_lse, out, out_lse);
  return {out, out_lse};
}

void merge_attention_states_inplace(const Tensor& a, const Tensor& a_lse, const Tensor& b, const Tensor& b_lse) {
  // On a GPU several threads read an lse.
  Checks("merge_attention_states", a)
      .require(gpu_of(a) == nullptr, "a must be on the CPU for inplace, got one on CUDA");
  merge(a, a_lse, b, b_lse, a, a_lse);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("merge_attention_states", TORCH_BOX(&merge_attention_states));
  m.impl("merge_attention_states.inplace", TORCH_BOX(&merge_attention_states_inplace));
}

}  // namespace fastinfer
