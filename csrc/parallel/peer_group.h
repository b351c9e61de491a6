// GPUs of one machine that compute a model together (its ranks) and address each other's memory, and what they share.
//
// An exchange on GPUs is a kernel on each of them. A block copies its part into the rank's own memory, tells the block
// with the same number on all other ranks, waits for theirs, and reads their memory; in all_gather_rows it writes into
// the memory of all ranks before. So blocks wait for blocks with their own number alone. Each rank's memory has two
// slots, used in turns: a rank that writes exchange n + 2 has seen all ranks begin exchange n + 1, so all have ended
// exchange n, which was in the same slot.
//
// No wait is without bound. A block that waits longer than the deadline sets a word in the host's memory and goes on,
// with results that mean nothing; the rank's later waits then end soon. The host reads the word after a step, and sets
// it itself to end all waits of the rank.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastinfer::parallel {

inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxExchangeBlocks = 64;

// What one rank knows of the group: plain data of its own process, whose addresses are valid on its GPU.
struct PeerGroup {
  int64_t size;                  // number of ranks
  int64_t slot_bytes;            // a multiple of 16
  int64_t one_shot_bytes;        // of the largest sum that takes one barrier (parallel/peer_plan.h)
  int64_t deadline_ns;           // longest wait for another rank
  uint64_t* aborted;             // one word of pinned host memory: not zero once the rank waits no more
  std::byte* memory[kMaxPeers];  // of each rank: a PeerState, then two slots; 16-byte aligned
};

// The beginning of each rank's memory, zeros before the first exchange.
struct alignas(16) PeerState {
  uint64_t exchanges[kMaxExchangeBlocks];              // that have ended; each block of the rank reads its own
  uint64_t arrived[2][kMaxExchangeBlocks][kMaxPeers];  // the last exchange in which the peer's block came to a barrier
};

// Number of bytes of a rank's memory.
inline size_t peer_memory_bytes(int64_t slot_bytes) {
  return sizeof(PeerState) + 2 * static_cast<size_t>(slot_bytes);
}

}  // namespace fastinfer::parallel
