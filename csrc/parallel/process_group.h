// Processes of one machine that compute a model together (its ranks), and the memory that they share.
//
// An exchange is a barrier between two copies: each rank writes its part into a slot, waits until all have arrived, and
// reads the whole slot. There are two slots, used in turns. A rank that writes exchange n + 2 has seen all ranks arrive
// at exchange n + 1, so all have read what exchange n left in the same slot: one barrier for each exchange is enough.
//
// No wait is without bound. A rank that waits longer than the deadline, or sees that the others do something else than
// it does, sets a flag that ends the waits of all ranks with an error. So does whoever learns that a rank has died.
// The deadline is that of an exchange, at which all ranks arrive at nearly the same time. A whole step of another rank,
// for which the next stage of a pipeline waits, may take kStepDeadlines times as long.
//
// Consecutive ranks of a group may be a team, which exchanges by itself: a group of its own in the same memory, whose
// flag is that of the whole group.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/api.h"

namespace fastinfer::parallel {

inline constexpr int kMaxRanks = 64;
inline constexpr int kMessageWords = 4096;
inline constexpr int kMaxMessages = 64;
inline constexpr int kStepDeadlines = 20;

struct alignas(64) RankState {
  std::atomic<uint64_t> arrived;  // exchanges whose part the rank has written
  std::atomic<uint64_t> tags[2];  // what the rank exchanges, for both slots
  std::atomic<uint64_t> bytes;    // bytes of all its parts
  std::atomic<uint32_t> done;     // number of the last message that the rank has carried out
};

// What rank 0 wants of the others.
struct Message {
  int64_t num_words;
  int64_t words[kMessageWords];
};

// The beginning of the shared memory, zeros before initialize(); the slots follow.
struct Group {
  int64_t size;  // number of ranks
  int64_t slot_bytes;
  int64_t deadline_ns;   // of an exchange
  int64_t num_messages;  // that rank 0 may send before the first of them is carried out
  int64_t whole_offset;  // of a team: bytes from the whole group to here, otherwise 0
  int64_t first_rank;    // of a team: number of its rank 0 in the whole group
  alignas(64) std::atomic<uint32_t> aborted;
  alignas(64) std::atomic<uint32_t> message_number;  // waiting ranks sleep on it
  Message messages[kMaxMessages];                    // message n is in place n % num_messages
  RankState ranks[kMaxRanks];
};

inline constexpr size_t kSlotsOffset = (sizeof(Group) + 4095) / 4096 * 4096;

// Number of bytes of a group whose slots have this size.
inline size_t group_bytes(int64_t slot_bytes) {
  return kSlotsOffset + 2 * static_cast<size_t>(slot_bytes);
}

// Errors of all functions are std::runtime_error, std::invalid_argument for arguments.
FASTINFER_API void initialize(Group& group, int64_t size, int64_t slot_bytes, double deadline_seconds,
                              int64_t num_messages = 1);

// Makes `team` a team of the ranks first_rank .. first_rank + size - 1 of the whole group, which lies before it in the
// same memory.
FASTINFER_API void initialize_team(Group& team, const Group& whole, int64_t first_rank, int64_t size);

// The slot of this rank's next exchange.
FASTINFER_API std::byte* next_slot(Group& group, int rank);

// What the ranks must agree on in an exchange: columns or rows that are put together, or a sum.
enum Kind : uint64_t { kColumns = 1, kRows = 2, kSum = 3 };

inline uint64_t tag(Kind kind, int64_t rows, int64_t row_bytes) {
  return kind << 62 ^ static_cast<uint64_t>(rows) << 32 ^ static_cast<uint64_t>(row_bytes);
}

// Waits until all ranks have written their parts of the slot.
// `tag` must be the same on all ranks; `bytes` is the size of this rank's part.
FASTINFER_API void exchange(Group& group, int rank, uint64_t tag, uint64_t bytes);

// Rank 0: waits until the other ranks have carried out all messages but the last `num_messages - 1`, and sends another.
FASTINFER_API void send(Group& group, const std::vector<int64_t>& words);

// Other ranks: waits for the next message, without a deadline. It must be followed by finish().
FASTINFER_API std::vector<int64_t> receive(Group& group, int rank);
FASTINFER_API void finish(Group& group, int rank);

// Waits until another rank has finished the message that this rank carries out next. Rank 0 calls finish(), too, if it
// carries out messages itself.
FASTINFER_API void wait_for(Group& group, int rank, int other);

// Ends all waits, now and later, with an error.
FASTINFER_API void abort(Group& group);

}  // namespace fastinfer::parallel
