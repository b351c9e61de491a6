#include "common/cpu/parallel.h"
#include "gemm/gemm.h"

namespace fastinfer {

void part_expert_rows(int64_t first, ExpertRows& before, ExpertRows& rest) {
  constexpr int kSlot = 7;  // the products use those before
  const ExpertRows rows = before;
  const int64_t count = rows.start[rows.experts];
  auto* memory = cpu::scratch_array<int32_t>(kSlot, 2 * (rows.experts + 1 + count));
  for (ExpertRows* part : {&before, &rest}) {
    int32_t *const start = memory, *const row_ids = start + rows.experts + 1;
    memory = row_ids + count;
    int32_t found = 0;
    start[0] = 0;
    for (int expert = 0; expert < rows.experts; ++expert) {
      for (int32_t row = rows.start[expert]; row < rows.start[expert + 1]; ++row) {
        if ((rows.x_row(row) < first) == (part == &before)) row_ids[found++] = rows.row_ids[row];
      }
      start[expert + 1] = found;
    }
    part->start = start, part->row_ids = row_ids;
  }
}

}  // namespace fastinfer
