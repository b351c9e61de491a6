// Every rank adds up the parts of all ranks: one exchange, and no rank depends on the sums of another one.
#include "parallel/all_reduce.h"

#include <algorithm>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kAlignment = 64;  // of a rank's part in a slot, bytes
constexpr int64_t kBlock = 1024;    // elements that a thread adds up at a time

// out[i] = the sum of parts[rank * stride + i] over the ranks.
template <class T>
void add_parts(const T* parts, int64_t stride, int64_t ranks, int64_t elements, T* out) {
  for_each_vector(elements, [&](int64_t i, int64_t lanes) {
    f32v sum = load_lanes(parts + i, lanes);
    for (int64_t rank = 1; rank < ranks; ++rank) sum += load_lanes(parts + rank * stride + i, lanes);
    store_lanes(out + i, sum, lanes);
  });
}

}  // namespace

void all_reduce(const AllReduceParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    const int64_t most = p.group->slot_bytes / p.group->size / kAlignment * kAlignment / kSize;
    for (int64_t first = 0; first < p.elements; first += most) {
      const int64_t count = std::min(most, p.elements - first);
      auto* const parts = reinterpret_cast<T*>(parallel::next_slot(*p.group, p.rank));
      std::memcpy(parts + p.rank * most, static_cast<const T*>(p.x) + first, count * kSize);
      parallel::exchange(*p.group, p.rank, parallel::tag(parallel::kSum, count, static_cast<int64_t>(p.dtype)),
                         count * kSize);
      T* const out = static_cast<T*>(p.out) + first;
      parallel_for((count + kBlock - 1) / kBlock, [&](int64_t begin, int64_t end) {
        const int64_t start = begin * kBlock, stop = std::min(end * kBlock, count);
        add_parts(parts + start, most, p.group->size, stop - start, out + start);
      });
    }
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
