// Check of the arguments `group` and `rank`, which all operators on the memory of a group have.
#pragma once

#include "binding/output.h"
#include "parallel/process_group.h"

namespace fastinfer {

inline parallel::Group* group_of(const Checks& check, const Tensor& memory, int64_t rank) {
  check.shape(memory, "group", {kAny});
  check.dtype(memory, "group", ScalarType::Byte);
  check.contiguous(memory, "group");
  auto* const group = static_cast<parallel::Group*>(memory.data_ptr());
  const bool is_group = static_cast<size_t>(memory.numel()) >= parallel::kSlotsOffset && group->size >= 1 &&
                        static_cast<size_t>(memory.numel()) >= parallel::group_bytes(group->slot_bytes);
  check.require(is_group, "group must be the memory of a process group, got ", memory.numel(), " bytes of none");
  check.require(rank >= 0 && rank < group->size, "rank must be in 0..", group->size - 1, ", got ", rank);
  return group;
}

}  // namespace fastinfer
