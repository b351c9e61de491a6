// Moves elements one by one: compiled once, for every instruction set.
#include "common/cpu/parallel.h"
#include "elementwise/permute_columns.h"

namespace fastinfer::cpu {
namespace {

template <class Element>
void permute_rows(const PermuteColumnsParams& p) {
  parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const auto* x = static_cast<const Element*>(p.x) + token * p.x_stride;
      auto* out = static_cast<Element*>(p.out) + token * p.cols;
      for (int64_t i = 0; i < p.cols; ++i) out[i] = x[p.permutation[i]];
    }
  });
}

}  // namespace

void permute_columns(const PermuteColumnsParams& p) {
  p.wide ? permute_rows<uint32_t>(p) : permute_rows<uint16_t>(p);
}

}  // namespace fastinfer::cpu
