// Rows of a call that are tokens of a prompt. CPU kernels compute them in bf16 tiles where the CPU has AMX.
#pragma once

#include <cstdint>

namespace fastinfer {

// The value that fastinfer.ops.prompt_rows() has set for this thread: rows from this one on are tokens of a prompt.
// Without it the largest integer, because no row is.
int64_t first_prompt_row();

}  // namespace fastinfer
