// An integer for each row: compiled once, for every instruction set.
#include "common/cpu/parallel.h"
#include "moe/head_rows.h"

namespace fastinfer::cpu {

void head_rows(const HeadRowsParams& p) {
  for (int head = 0; head <= p.heads; ++head) p.head_start[head] = static_cast<int32_t>(head * p.tokens);
  parallel_for(p.heads, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      int32_t* rows = p.row_ids + head * p.tokens;
      for (int64_t token = 0; token < p.tokens; ++token) rows[token] = static_cast<int32_t>(token * p.heads + head);
    }
  });
}

}  // namespace fastinfer::cpu
