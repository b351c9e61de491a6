// Slots of recurrent states: where a sequence's state is read before its first token, and stored after which tokens.
#pragma once

#include <cstdint>

namespace fastinfer {

// No slot is written twice. One that a sequence reads may be one that it writes, but no other sequence may write it.
struct StateSlots {
  const int32_t* query_start;  // [seqs + 1]
  const int32_t* reads;        // [seqs]; -1: the state is zero
  const int32_t* writes;       // [tokens]; -1: the state after this token is not stored
  int64_t seqs;
  int64_t slots;
  int64_t stride;  // elements between slots
};

}  // namespace fastinfer
