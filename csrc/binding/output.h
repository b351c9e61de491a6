// The destination of an operator's result: a new tensor, or one from the caller. Two overloads of the operator, `op`
// and `op.out`, share one function.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {

class Output {
 public:
  Output() = default;  // a new tensor

  // The caller's, in a call with these arguments.
  template <class... Args>
  explicit Output(const Tensor& out, const Args&... args) : out_(&out), inputs_{tensor_of(args)...} {}

  // For a result like new_tensor's. The result may overwrite the inputs in `replaceable`: the kernel's
  // thread that writes an element is the last to read the input's element, and does so before.
  Tensor tensor(const Checks& check, const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                std::optional<ScalarType> dtype = std::nullopt,
                std::initializer_list<const Tensor*> replaceable = {}) const {
    if (out_ == nullptr) return new_tensor(like, sizes, dtype);
    check.shape(*out_, "out", sizes);
    check.dtype(*out_, "out", dtype.value_or(like.scalar_type()));
    check.contiguous(*out_, "out");
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor* const input = inputs_[i];
      if (input == nullptr || !overlaps(*input)) continue;
      const bool may = std::find(replaceable.begin(), replaceable.end(), input) != replaceable.end();
      const bool same = input->data_ptr() == out_->data_ptr() && input->numel() == out_->numel();
      check.require(may && same, "out must be apart from argument ", i + 1, may ? " or that tensor itself" : "",
                    ", got one that overlaps it");
    }
    return *out_;
  }

 private:
  static const Tensor* tensor_of(const Tensor& t) {
    return &t;
  }
  static const Tensor* tensor_of(const std::optional<Tensor>& t) {
    return t ? &*t : nullptr;
  }
  template <class T>
  static const Tensor* tensor_of(const T&) {
    return nullptr;
  }

  // Returns true if the bytes from a tensor's first to its last element, including gaps, overlap those of out.
  bool overlaps(const Tensor& t) const {
    if (t.numel() == 0 || out_->numel() == 0) return false;
    const auto range = [](const Tensor& of) {
      int64_t last = 0;
      for (int64_t i = 0; i < of.dim(); ++i) last += (of.size(i) - 1) * of.stride(i);
      const auto begin = reinterpret_cast<uintptr_t>(of.data_ptr());
      return std::pair{begin, begin + (last + 1) * of.element_size()};
    };
    const auto [begin, end] = range(t);
    const auto [out_begin, out_end] = range(*out_);
    return begin < out_end && out_begin < end;
  }

  const Tensor* out_ = nullptr;
  std::vector<const Tensor*> inputs_;  // one entry per argument, null if it is no tensor
};

template <auto kOp>
struct Overloads;

template <class... Args, Tensor (*kOp)(const Output&, Args...)>
struct Overloads<kOp> {
  static Tensor returns(Args... args) {
    return kOp(Output(), args...);
  }
  static void fills(Args... args, const Tensor& out) {
    kOp(Output(out, args...), args...);
  }
};

// Registers Tensor op(const Output&, arguments of the schema), whose tensors come by reference, for both overloads.
template <auto kOp>
void impl_with_out(torch::stable::detail::StableLibrary& m, const std::string& name) {
  m.impl(name.c_str(), TORCH_BOX(&Overloads<kOp>::returns));
  m.impl((name + ".out").c_str(), TORCH_BOX(&Overloads<kOp>::fills));
}

}  // namespace fastinfer
