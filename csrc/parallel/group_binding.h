// Check of the arguments `group` and `rank`, which all operators of a group of ranks have.
#pragma once

#include "binding/output.h"
#include "parallel/peer_group.h"
#include "parallel/process_group.h"

namespace fastinfer {

// The group that ranks on the device of x form: of CPUs in shared memory, of GPUs by a table of addresses, which lies
// in host memory.
struct GroupArgument {
  GroupArgument(const char* op, const Tensor& x, const Tensor& memory, int64_t rank) {
    const Checks check(op, memory);
    check.shape(memory, "group", {kAny});
    check.dtype(memory, "group", ScalarType::Byte);
    check.contiguous(memory, "group");
    check.require(memory.is_cpu(), "group must be in host memory, got one on ", format_device(memory.device()));
    gpu_of(x) != nullptr ? find_gpus(check, memory) : find_cpus(check, memory);
    check.require(rank >= 0 && rank < size, "rank must be in 0..", size - 1, ", got ", rank);
  }

  // What is exchanged in whole rows.
  void check_row(const Checks& check, int64_t row_bytes) const {
    check.require(row_bytes > 0 && row_bytes <= slot_bytes, "a row must have between 1 and ", slot_bytes,
                  " bytes, the size of the group's slots, got ", row_bytes);
  }

  parallel::Group* cpus = nullptr;
  const parallel::PeerGroup* gpus = nullptr;
  int64_t size = 0;  // number of ranks
  int64_t slot_bytes = 0;

 private:
  void find_cpus(const Checks& check, const Tensor& memory) {
    cpus = static_cast<parallel::Group*>(memory.data_ptr());
    const auto bytes = static_cast<size_t>(memory.numel());
    const bool is_group =
        bytes >= parallel::kSlotsOffset && cpus->size >= 1 && bytes >= parallel::group_bytes(cpus->slot_bytes);
    check.require(is_group, "group must be the memory of a process group, got ", bytes, " bytes of none");
    size = cpus->size;
    slot_bytes = cpus->slot_bytes;
  }

  void find_gpus(const Checks& check, const Tensor& memory) {
    gpus = static_cast<const parallel::PeerGroup*>(memory.data_ptr());
    const auto bytes = static_cast<size_t>(memory.numel());
    const bool is_group = bytes == sizeof(parallel::PeerGroup) && gpus->size >= 1 && gpus->size <= parallel::kMaxPeers;
    check.require(is_group, "group must be the table of a group of GPUs, got ", bytes, " bytes of none");
    size = gpus->size;
    slot_bytes = gpus->slot_bytes;
  }
};

}  // namespace fastinfer
