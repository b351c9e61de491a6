// Dense weights stay as they are, row-major: each output is a dot product along the inputs, a few rows of x by a few of
// the weight at a time. With one row of x, rows of the weight that are not long are read one by one: as a single stream
// they come at the speed of the memory. Long rows come faster eight at once, with prefetching
// (docs/performance-log.md, dense products). With more than eight rows of x, the sums of 64 or 128 rows of the weight
// and of up to 512 of x are kept, and the products go from one chunk of inputs to the next: then a block of x is read
// once for all of these rows of the weight.
//
// The inputs are cut into chunks. Over a chunk, lane i of a vector adds up every kLanes-th product, one after another;
// a tree adds the lanes, and the chunks' sums follow one another. Nothing in that depends on how many rows x has.
#include "gemm/gemm_cpu.h"

#include "common/cpu/reduce.h"
#if defined(FASTINFER_TILES)
#include "gemm/tile_gemm_cpu.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int kChunkBytes = 4096;  // inputs: a block of x takes 256 KB then, and stays in the L2
constexpr int kColumns = 8;        // rows of the weight that are read side by side
// Rows of the weight whose sums are kept: more of them where x is too large for the L3, from which it is read once for
// all of them.
constexpr int64_t kColumnsTogether = 64, kMostColumnsTogether = 128, kLargeBytes = 16 << 20;
#if defined(FASTINFER_AVX512_VNNI)
constexpr int kTileColumns = 4;  // 6 x 4 takes 24 sums and 5 operands, of 32 registers
#else
constexpr int kTileColumns = 2;  // 6 x 2 takes 12 sums and 3 operands, of 16 registers
#endif

// Products in fp32 of weights of any type, which are widened: exact but for fp32's own rounding.
struct FloatProducts {
  using Element = float;
  static constexpr int kStep = kLanes, kChunk = kChunkBytes / 4;
  static constexpr int kMostInputsAlone = 1000;  // of rows that are read one by one

  template <class T>
  FASTINFER_INLINE static f32v load(const T* p) {
    return cpu::FASTINFER_ISA::load(p);
  }
  FASTINFER_INLINE static f32v add(f32v sum, f32v w, f32v x) {
    return sum + w * x;
  }
};

#if defined(FASTINFER_AVX512_BF16)
// Products of bf16 with bf16, two of them into each lane: dpbf16 rounds as fp32 does, but counts denormals as zero.
struct BFloat16Products {
  using Element = BFloat16;
  static constexpr int kStep = 2 * kLanes, kChunk = kChunkBytes / 2;
  static constexpr int kMostInputsAlone = 4000;

  FASTINFER_INLINE static u16v load(const BFloat16* p) {
    return load_as<u16v>(p);
  }
  FASTINFER_INLINE static f32v add(f32v sum, u16v w, u16v x) {
    return dpbf16(sum, w, x);
  }
};
#endif

typedef float f32x2 __attribute__((vector_size(8)));

template <class V>
FASTINFER_INLINE void add_to(float* sums, V values) {
  store_as(sums, load_as<V>(sums) + values);
}

// Adds to sums[kM][kN] the products of kM rows of x with kN of the weight over `count` inputs; inlined, its sums would
// be spilled. Few rows of the weight are too few streams for the hardware to fetch in time, so those `ahead` elements
// further, which come next, are prefetched: for one row of x into the L2, because eight rows of the weight fill the L1.
// `later_x`, as many inputs of a row that is multiplied later, is prefetched into the L2, too, where the x of many rows
// does not fit.
template <class Products, int kM, int kN, class W>
__attribute__((noinline)) void multiply(const W* const* w, const typename Products::Element* x, int64_t x_stride,
                                        int64_t count, int64_t ahead, const typename Products::Element* later_x,
                                        float* sums, int stride) {
  f32v acc[kM][kN] = {};
  for (int64_t i = 0; i < count; i += Products::kStep) {
    decltype(Products::load(x)) columns[kN];
#pragma GCC unroll 8
    for (int c = 0; c < kN; ++c) columns[c] = Products::load(w[c] + i);
    if ((kN == kTileColumns || kM == 1) && ahead != 0) {
      for (int c = 0; c < kN; ++c) __builtin_prefetch(w[c] + i + ahead, 0, kM == 1 ? 2 : 3);
    }
    if (kM == 6) __builtin_prefetch(later_x + i, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
      const auto row = in_register(Products::load(x + r * x_stride + i));
#pragma GCC unroll 8
      for (int c = 0; c < kN; ++c) acc[r][c] = Products::add(acc[r][c], columns[c], row);
    }
  }
  if constexpr (kN == 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kM; r += 2) {
      const f32x4 four = reduce_add(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1]);
      add_to(sums + r * stride, f32x2{four[0], four[1]});
      add_to(sums + (r + 1) * stride, f32x2{four[2], four[3]});
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kN; c += 4) {
        add_to(sums + r * stride + c, reduce_add(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]));
      }
    }
  }
}

// Rows of x after the prologue, followed by zeros up to a multiple of the products' step.
template <class Element>
struct Rows {
  const Element* data;
  int64_t stride;        // between rows of a chunk
  int64_t chunk_stride;  // between chunks of a row
};

template <class Products, class W>
class DenseGemm {
  using Element = typename Products::Element;

 public:
  DenseGemm(const DenseGemmParams& p, const Rows<Element>& x) : p_(p), x_(x) {}

  void run() const {
    const int width = p_.activation != Activation::kNone ? 2 * kTileRows : kTileRows;  // rows of the weight in a unit
    for_each_run(p_, (p_.n + width - 1) / width, 0,
                 [&](int64_t expert, int64_t first, int64_t last, int64_t begin, int64_t end) {
                   const int64_t sweep = std::min(kSweepRows, end - begin);
                   const int64_t bytes = sweep * p_.k * static_cast<int64_t>(sizeof(Element));
                   const int64_t columns = bytes > kLargeBytes ? kMostColumnsTogether : kColumnsTogether;
                   const int64_t together = sweep <= kRowsOfGroups ? kUnitsOfGroups : columns / width;
                   auto* sums = scratch_array<float>(kTileSums, sweep * together * width);
                   for (; first < last; first += together) {
                     for (int64_t row0 = begin; row0 < end; row0 += sweep) {
                       multiply_units(expert, first, std::min(together, last - first), width, row0,
                                      static_cast<int>(std::min(sweep, end - row0)), sums);
                     }
                   }
                 });
  }

 private:
  // Computes the outputs of some rows and units, whose sums are kept until the last chunk.
  void multiply_units(int64_t expert, int64_t first, int64_t count, int width, int64_t row0, int rows,
                      float* sums) const {
    const W* weight = static_cast<const W*>(p_.weight) + expert * p_.n * p_.k;
    const int64_t n0 = first * width, columns = count * width, unit_size = rows * width;
    std::fill_n(sums, columns * rows, 0.0f);
    const auto multiply_block = [&](int64_t i, int64_t row, int64_t column) {
      multiply_chunk(weight, n0 + column, i, row0 + row, std::min<int>(kRowBlock, rows - row), column,
                     sums + column / width * unit_size + row * width + column % width, width);
    };
    if (rows == 1 && kReadsLines && p_.k <= Products::kMostInputsAlone) {
      multiply_row(weight, n0, columns, row0, sums);
    } else if (rows <= kRowsOfGroups) {  // the weight is read as long streams
      for (int64_t column = 0; column < columns; column += kColumns) {
        for (int64_t i = 0; i < p_.k; i += Products::kChunk) multiply_block(i, 0, column);
      }
    } else {  // a block of x comes from memory once for all columns
      for (int64_t i = 0; i < p_.k; i += Products::kChunk) {
        for (int64_t row = 0; row < rows; row += kRowBlock) {
          for (int64_t column = 0; column < columns; column += kColumns) multiply_block(i, row, column);
        }
      }
    }
    for (int64_t unit = 0; unit < count; ++unit) {
      finish(p_, expert, {.data = sums + unit * unit_size, .stride = width, .first = first + unit}, row0, rows);
    }
  }

  // Whether each load of the weight is a line of the cache: then a single sum keeps up with the memory.
  static constexpr bool kReadsLines = Products::kStep * sizeof(W) == 64;

  // Adds the products of one row of x with the weight's rows n0 .. n0 + columns, one by one. The sums are those of
  // `multiply`, bit for bit.
  void multiply_row(const W* weight, int64_t n0, int64_t columns, int64_t row0, float* sums) const {
    f32v lanes[4] = {};
    float* targets[4];
    int waiting = 0;
    const auto add_waiting = [&] {
      const f32x4 four = reduce_add(lanes[0], lanes[1], lanes[2], lanes[3]);
      for (int i = 0; i < waiting; ++i) *targets[i] += four[i];
      waiting = 0;
    };
    const auto add_product = [&](const W* w, const Element* x, int64_t count, float* sum) {
      lanes[waiting] = dot(w, x, count);
      targets[waiting] = sum;
      if (++waiting == 4) add_waiting();
    };
    for (int64_t c = 0; c < std::min(columns, p_.n - n0); ++c) {
      for (int64_t i = 0; i < p_.k; i += Products::kChunk) {
        const int64_t count = std::min<int64_t>(Products::kChunk, p_.k - i),
                      whole = count / Products::kStep * Products::kStep;
        const W* w = weight + (n0 + c) * p_.k + i;
        const Element* x = x_at(row0, i);
        if (whole > 0) add_product(w, x, whole, sums + c);
        if (whole == count) continue;
        W rest[Products::kStep] = {};
        std::copy(w + whole, w + count, rest);
        add_product(rest, x + whole, Products::kStep, sums + c);
      }
    }
    add_waiting();
  }

  const Element* x_at(int64_t row, int64_t i) const {
    return x_.data + i / Products::kChunk * x_.chunk_stride + row * x_.stride;
  }

  FASTINFER_INLINE static f32v dot(const W* w, const Element* x, int64_t count) {
    f32v sum = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i += Products::kStep) {
      sum = Products::add(sum, Products::load(w + i), Products::load(x + i));
    }
    return sum;
  }

  // Adds the products with the weight's rows n0 .. n0 + kColumns over the chunk of inputs that starts at i. `column`
  // says how many rows of the weight the same rows of x have been multiplied with: each eight of the first 64 prefetch
  // eight rows of the next block.
  void multiply_chunk(const W* weight, int64_t n0, int64_t i, int64_t row0, int rows, int64_t column, float* sums,
                      int stride) const {
    const int64_t count = std::min<int64_t>(Products::kChunk, p_.k - i),
                  whole = count / Products::kStep * Products::kStep;
    const W* w[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      w[c] = weight + std::min(n0 + c, p_.n - 1) * p_.k + i;  // past the end: a row again
    }
    const Element* x = x_at(row0, i);
    if (whole > 0)
      multiply_rows(w, x, rows, whole, column < kRowBlock ? x_at(row0 + kRowBlock + column, i) : x, sums, stride);
    if (whole == count) return;
    W rest[kColumns][Products::kStep] = {};
    for (int c = 0; c < kColumns; ++c) {
      std::copy(w[c] + whole, w[c] + count, rest[c]);
      w[c] = rest[c];
    }
    multiply_rows(w, x + whole, rows, Products::kStep, x, sums, stride);
  }

  void multiply_rows(const W* const* w, const Element* x, int rows, int64_t count, const Element* later_x, float* sums,
                     int stride) const {
    int row = 0;
    // The other tiles prefetch the row that they read, which costs less than a branch.
    const auto tiles = [&]<int kM, int kN>() {
      for (; row + kM <= rows; row += kM) {
        for (int c = 0; c < kColumns; c += kN) {
          multiply<Products, kM, kN>(w + c, x + row * x_.stride, x_.stride, count, row == 0 ? kN * p_.k : 0,
                                     c == 0 && row < 8 * kM ? later_x + row / kM * x_.stride : x + row * x_.stride,
                                     sums + row * stride + c, stride);
        }
      }
    };
    tiles.template operator()<6, kTileColumns>();
    tiles.template operator()<4, kTileColumns>();
    tiles.template operator()<2, 4>();
    tiles.template operator()<1, 8>();
  }

  const DenseGemmParams& p_;
  Rows<Element> x_;
};

#if defined(FASTINFER_TILES)
// A dense weight as bf16 tiles.
template <class W>
struct DenseTiles {
  const DenseGemmParams& p;

  void unpack(int64_t expert, int64_t tile, int64_t begin, int64_t end, uint8_t* out) const {
    const int64_t row = tile * kTileRows, input = begin * kBlockInputs;
    const W* first = static_cast<const W*>(p.weight) + (expert * p.n + row) * p.k + input;
    pack_columns(first, p.k, std::min<int64_t>(kTileRows, p.n - row), p.k - input, end - begin, out);
  }
};
#endif

#if defined(FASTINFER_AVX512_BF16) && !defined(FASTINFER_TILES)
// Chunks of all rows one after another: those of a block's rows are then in different sets of the L2.
Rows<BFloat16> bfloat16_rows(const GemmParams& p) {
  constexpr int kStep = BFloat16Products::kStep, kChunk = BFloat16Products::kChunk;
  const int64_t padded = (p.k + kStep - 1) / kStep * kStep, chunks = (p.k + kChunk - 1) / kChunk;
  const int64_t stride = std::min<int64_t>(kChunk, padded) + 32;  // a line of the cache more, as in float_rows
  auto* data = scratch_array<BFloat16>(kActivations, chunks * p.m * stride);
  for_each_row_range(p, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const BFloat16* x = static_cast<const BFloat16*>(p.x) + p.expert_rows.x_row(row) * p.x_stride;
      for (int64_t i = 0; i < p.k; i += kChunk) {
        BFloat16* out = data + (i / kChunk * p.m + row) * stride;
        std::fill(std::copy_n(x + i, std::min<int64_t>(kChunk, p.k - i), out), out + stride, BFloat16{0});
      }
    }
  });
  return {data, stride, p.m * stride};
}
#endif

}  // namespace

void gemm(const DenseGemmParams& p) {
#if defined(FASTINFER_TILES)
  dispatch(p.weight_dtype, [&]<class W>(W) { run_tile_gemm(p, DenseTiles<W>{p}); });
#else
#if defined(FASTINFER_AVX512_BF16)
  // Only where x is bf16 as it stands: a normalised row is fp32, and nothing rounds it silently.
  if (p.dtype == DType::kBFloat16 && p.weight_dtype == DType::kBFloat16 && p.norm_weight.data == nullptr) {
    return DenseGemm<BFloat16Products, BFloat16>(p, bfloat16_rows(p)).run();
  }
#endif
  const FloatRows x = float_rows(p);
  dispatch(p.weight_dtype,
           [&]<class W>(W) { DenseGemm<FloatProducts, W>(p, {x.data, x.stride, FloatProducts::kChunk}).run(); });
#endif
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
