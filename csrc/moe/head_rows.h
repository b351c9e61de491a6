// Lists the rows of each head, for grouped products whose experts are heads: row token * heads + head belongs to a
// head.
#pragma once

#include <cstdint>

#include "common/api.h"

namespace fastinfer {

inline constexpr int64_t kMostHeads = 1024;

struct HeadRowsParams {
  int32_t* row_ids;     // [tokens heads]: rows ordered by head, then by token
  int32_t* head_start;  // [heads + 1]: where a head's rows begin in row_ids
  int64_t tokens;
  int heads;
};

namespace cpu {
FASTINFER_API void head_rows(const HeadRowsParams& params);
}

namespace cuda {
FASTINFER_API void head_rows(const HeadRowsParams& params, void* stream);
}

}  // namespace fastinfer
