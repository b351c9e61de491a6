// The warp's operations on the values of its 32 lanes. Compiled without instrumentation: the last lane reads and writes
// the others' variables.
#include <bit>
#include <cstring>
#include <limits>

#include "emulator.h"

namespace emulation {
namespace {

constexpr uint32_t kAll = 0xffffffffu;

struct Shuffle {
  uint64_t value, result;
  int source;
};

void complete_shuffle(void* const (&ops)[32], uint32_t mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto& self = *static_cast<Shuffle*>(ops[lane]);
    self.result = mask >> self.source & 1 ? static_cast<const Shuffle*>(ops[self.source])->value : ~uint64_t{0};
  }
}

struct Vote {
  bool value;
  uint32_t result;
};

void complete_vote(void* const (&ops)[32], uint32_t mask) {
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) ballot |= uint32_t{static_cast<const Vote*>(ops[lane])->value} << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Vote*>(ops[lane])->result = ballot;
  }
}

struct LoadMatrix {
  const uint16_t* row;
  uint32_t* r;
  int matrices;
  bool transposed;
};

void complete_load_matrix(void* const (&ops)[32], uint32_t /*mask*/) {
  const auto at = [&](int matrix, int row, int column) {
    return uint32_t{static_cast<const LoadMatrix*>(ops[8 * matrix + row])->row[column]};
  };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& self = *static_cast<const LoadMatrix*>(ops[lane]);
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int i = 0; i < self.matrices; ++i) {
      self.r[i] = self.transposed ? at(i, t, g) | at(i, t + 1, g) << 16 : at(i, g, t) | at(i, g, t + 1) << 16;
    }
  }
}

struct Mma {
  void* d;
  const uint32_t* a;
  const uint32_t* b;
};

float half(uint32_t word, int i) {
  const uint32_t bits = word >> (16 * i) & 0xffff, magnitude = (bits & 0x7fff) << 13;
  const bool special = (bits & 0x7c00) == 0x7c00;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>((bits & 0x8000) << 16 | (special ? magnitude | 0x7f800000 : scaled));
}
float bfloat16(uint32_t word, int i) {
  return std::bit_cast<float>(word >> (16 * i) << 16);
}
float tf32(uint32_t word, int /*i*/) {
  if (word & 0x1fff) return std::numeric_limits<float>::quiet_NaN();  // a GPU may do anything with these bits
  return std::bit_cast<float>(word);
}
int32_t int8(uint32_t word, int i) {
  return static_cast<int8_t>(word >> (8 * i));
}

// Computes an mma on the fragments of 32 lanes; kPerWord elements are packed in a register.
template <class D, int kK, int kPerWord, D (*element)(uint32_t word, int i)>
void complete_mma(void* const (&ops)[32], uint32_t /*mask*/) {
  typedef D Row __attribute__((vector_size(8 * sizeof(D))));
  D a[16][kK];
  Row b[kK], d[16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& op = *static_cast<const Mma*>(ops[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < kPerWord; ++i) {
      for (int word = 0; word < 4; ++word) {
        a[g + 8 * (word % 2)][kPerWord * t + i + kK / 2 * (word / 2)] = element(op.a[word], i);
      }
      for (int word = 0; word < 2; ++word) b[kPerWord * t + i + kK / 2 * word][g] = element(op.b[word], i);
    }
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = static_cast<const D*>(op.d)[i];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < kK; ++k) d[m] += a[m][k] * b[k];
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& op = *static_cast<const Mma*>(ops[lane]);
    for (int i = 0; i < 4; ++i) static_cast<D*>(op.d)[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

struct Quad {
  const uint32_t* own;
  uint32_t (*all)[4];
};

void complete_quads(void* const (&ops)[32], uint32_t /*mask*/) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const auto& other = *static_cast<const Quad*>(ops[lane / 4 * 4 + i]);
      std::memcpy(static_cast<const Quad*>(ops[lane])->all[i], other.own, sizeof *other.all);
    }
  }
}

}  // namespace

void share_in_quad(const uint32_t (&own)[4], uint32_t (&all)[4][4], Site site) {
  Quad op{own, all};
  collective(kAll, &op, complete_quads, site);
}

uint64_t shuffle(uint32_t mask, uint64_t value, int source, Site site) {
  Shuffle op{value, value, source};
  collective(mask, &op, complete_shuffle, site);
  return op.result;
}

uint32_t vote(uint32_t mask, bool value, Site site) {
  Vote op{value, 0};
  collective(mask, &op, complete_vote, site);
  return op.result;
}

void load_matrix(uint32_t* r, const uint16_t (&row)[8], int matrices, bool transposed, Site site) {
  LoadMatrix op{row, r, matrices, transposed};
  collective(kAll, &op, complete_load_matrix, site);
}

void mma(Element element, void* d, const uint32_t* a, const uint32_t* b, Site site) {
  Mma op{d, a, b};
  switch (element) {
    case Element::kHalf: return collective(kAll, &op, complete_mma<float, 16, 2, half>, site);
    case Element::kBFloat16: return collective(kAll, &op, complete_mma<float, 16, 2, bfloat16>, site);
    case Element::kTf32: return collective(kAll, &op, complete_mma<float, 8, 1, tf32>, site);
    case Element::kInt8: return collective(kAll, &op, complete_mma<int32_t, 32, 4, int8>, site);
  }
}

}  // namespace emulation
