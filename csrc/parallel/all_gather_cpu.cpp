// Copies memory and waits: compiled once, for every instruction set.
#include <algorithm>
#include <cstring>

#include "common/cpu/parallel.h"
#include "parallel/all_gather.h"

namespace fastinfer::cpu {
namespace {

// Calls fn(first, count, slot) for ranges of rows that fit into a slot. fn writes this rank's part into the slot and
// returns its size in bytes; then the whole slot goes to `out`.
template <class Fn>
void exchange_rows(parallel::Group& group, int rank, parallel::Kind kind, int64_t rows, int64_t row_bytes, void* out,
                   const Fn& fn) {
  const int64_t most = group.slot_bytes / row_bytes;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    std::byte* const slot = parallel::next_slot(group, rank);
    const uint64_t bytes = fn(first, count, slot);
    parallel::exchange(group, rank, parallel::tag(kind, count, row_bytes), bytes);
    std::byte* const target = static_cast<std::byte*>(out) + first * row_bytes;
    parallel_for(count, [&](int64_t begin, int64_t end) {
      std::memcpy(target + begin * row_bytes, slot + begin * row_bytes, (end - begin) * row_bytes);
    });
  }
}

}  // namespace

void all_gather(const AllGatherParams& p) {
  const int64_t begin = p.starts[p.rank], bytes = p.starts[p.rank + 1] - begin, row_bytes = p.starts[p.group->size];
  const auto* x = static_cast<const std::byte*>(p.x);
  exchange_rows(*p.group, p.rank, parallel::kColumns, p.rows, row_bytes, p.out,
                [&](int64_t first, int64_t count, std::byte* slot) {
                  for (int64_t row = 0; row < count; ++row) {
                    std::memcpy(slot + row * row_bytes + begin, x + (first + row) * bytes, bytes);
                  }
                  return static_cast<uint64_t>(count * bytes);
                });
}

void all_gather_rows(const AllGatherRowsParams& p) {
  const auto* x = static_cast<const std::byte*>(p.x);
  exchange_rows(*p.group, p.rank, parallel::kRows, p.rows, p.row_bytes, p.out,
                [&](int64_t first, int64_t count, std::byte* slot) {
                  uint64_t bytes = 0;
                  for (int64_t row = first; row < first + count; ++row) {
                    if (p.ids[row] < p.start || p.ids[row] >= p.end) continue;
                    std::memcpy(slot + (row - first) * p.row_bytes, x + row * p.row_bytes, p.row_bytes);
                    bytes += p.row_bytes;
                  }
                  return bytes;
                });
}

void local_ids(const LocalIdsParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t id = p.ids[row];
    p.out[row] = id >= p.start && id < p.end ? id - p.start : 0;
  }
}

}  // namespace fastinfer::cpu
