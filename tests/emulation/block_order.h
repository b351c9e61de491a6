// The order in which a launch's blocks start. A GPU promises none.
#pragma once

#include <cstdint>
#include <vector>

namespace emulation {

// Numbers of the blocks, 0 .. count - 1. The order is "ascending", "descending", or "random:SEED" with a number, which
// gives the same order to every launch of as many blocks. It is what emulation_set_block_order was last called with.
std::vector<uint32_t> block_order(uint32_t count);

}  // namespace emulation

// Returns false for any other text.
extern "C" __attribute__((visibility("default"))) bool emulation_set_block_order(const char* order);
