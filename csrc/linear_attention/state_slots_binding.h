// Checks that the bindings of operators with recurrent states share.
#pragma once

#include "binding/checks.h"
#include "binding/launch.h"
#include "linear_attention/state_slots.h"

namespace fastinfer {

// A parameter of each head.
inline const float* head_floats(const Checks& check, const Tensor& t, const char* name, int64_t heads) {
  check.shape(t, name, {heads});
  check.dtype(t, name, ScalarType::Float);
  check.contiguous(t, name);
  return static_cast<const float*>(t.data_ptr());
}

// `size` is that of the state's dimension `name`.
inline void check_state_dim(const Checks& check, const char* state, const char* name, int64_t size, int64_t unit,
                            int64_t largest) {
  check.require(size > 0 && size % unit == 0 && size <= largest, state, " must have a ", name,
                " that is a multiple of ", unit, " up to ", largest, ", got ", size);
}

inline StateSlots state_slots(const Checks& check, const Tensor& state, const char* name, const Tensor& query_start,
                              const Tensor& state_reads, const Tensor& state_writes, int64_t tokens) {
  check.rows_contiguous(state, name);
  check.rows_apart(state, name);
  check.shape(state_reads, "state_reads", {kAny});
  const int64_t seqs = state_reads.size(0), slots = state.size(0);
  check.shape(query_start, "query_start", {seqs + 1});
  check.shape(state_writes, "state_writes", {tokens});
  for (const auto& [t, what] :
       {std::pair{&query_start, "query_start"}, {&state_reads, "state_reads"}, {&state_writes, "state_writes"}}) {
    check.dtype(*t, what, ScalarType::Int);
    check.contiguous(*t, what);
  }
  const StateSlots result{
      .query_start = static_cast<const int32_t*>(query_start.data_ptr()),
      .reads = static_cast<const int32_t*>(state_reads.data_ptr()),
      .writes = static_cast<const int32_t*>(state_writes.data_ptr()),
      .seqs = seqs,
      .slots = slots,
      .stride = state.stride(0),
  };
  if (gpu_of(state) != nullptr) return result;
  const int32_t* const start = result.query_start;
  check.require(start[0] == 0 && start[seqs] == tokens, "query_start must run from 0 to the number of tokens, ", tokens,
                ", got ", start[0], " to ", start[seqs]);
  for (int64_t seq = 0; seq < seqs; ++seq) {
    check.require(start[seq] <= start[seq + 1], "query_start must not decrease, got ", start[seq], " before ",
                  start[seq + 1]);
    const int32_t slot = result.reads[seq];
    check.require(slot >= -1 && slot < slots, "state_reads[", seq, "] must be in -1..", slots - 1, ", got ", slot);
  }
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t slot = result.writes[token];
    check.require(slot >= -1 && slot < slots, "state_writes[", token, "] must be in -1..", slots - 1, ", got ", slot);
  }
  return result;
}

}  // namespace fastinfer
