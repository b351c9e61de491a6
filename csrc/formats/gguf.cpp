#include "formats/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "formats/gguf_rows.h"
#include "gemm/gemm.h"
#include "quant/quantized_gemm.h"

namespace fastinfer {
namespace {

namespace py = pybind11;

static_assert(std::endian::native == std::endian::little);  // GGUF is little-endian

struct Bytes {
  Bytes(const py::buffer& buffer, const char* name, bool writable = false) : info(buffer.request(writable)) {
    if (!PyBuffer_IsContiguous(info.view(), 'C')) {
      throw std::invalid_argument(std::string(name) + " must be contiguous, got strides");
    }
  }

  int64_t size() const {
    return info.size * info.itemsize;
  }
  uint8_t* data() const {
    return static_cast<uint8_t*>(info.ptr);
  }

  py::buffer_info info;
};

// Gives `take` up to `count` strings, each a length of 8 bytes and that many bytes, until it refuses one or one would
// end past the file. Returns the position behind the last one that was taken.
template <class Take>
int64_t each_string(const Bytes& file, int64_t position, int64_t count, const Take& take) {
  if (position < 0 || position > file.size()) {
    throw std::invalid_argument("position must be in 0.." + std::to_string(file.size()) + ", got " +
                                std::to_string(position));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t left = file.size() - position;
    uint64_t length;
    if (left < 8) break;
    std::memcpy(&length, file.data() + position, 8);
    if (length > static_cast<uint64_t>(left - 8)) break;
    if (!take(reinterpret_cast<const char*>(file.data() + position + 8), static_cast<int64_t>(length))) break;
    position += 8 + static_cast<int64_t>(length);
  }
  return position;
}

std::pair<int64_t, int64_t> skip_strings(const py::buffer& buffer, int64_t position, int64_t count) {
  int64_t skipped = 0;
  const int64_t end = each_string(Bytes(buffer, "buffer"), position, count, [&](const char*, int64_t) {
    ++skipped;
    return true;
  });
  return {skipped, end};
}

std::pair<py::list, int64_t> read_strings(const py::buffer& buffer, int64_t position, int64_t count) {
  py::list texts;
  const int64_t end = each_string(Bytes(buffer, "buffer"), position, count, [&](const char* text, int64_t length) {
    const auto decoded = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text, length, "strict"));
    if (!decoded) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw py::error_already_set();
      PyErr_Clear();
      return false;
    }
    texts.append(decoded);
    return true;
  });
  return {std::move(texts), end};
}

// Offsets and types of the rows that a call reads, checked against the file.
struct Rows {
  Rows(const py::buffer& file_buffer, const py::buffer& offsets_buffer, const py::buffer& types_buffer, int64_t columns)
      : file(file_buffer, "file"), offsets_bytes(offsets_buffer, "offsets"), types_bytes(types_buffer, "types") {
    n = types_bytes.size();
    if (offsets_bytes.size() != n * 8) {
      throw std::invalid_argument("offsets must have 8 bytes for each of " + std::to_string(n) + " types, got " +
                                  std::to_string(offsets_bytes.size()));
    }
    offsets = reinterpret_cast<const int64_t*>(offsets_bytes.data());
    for (int64_t row = 0; row < n; ++row) {
      const GGUFBlock* const row_block = gguf_block(types_bytes.data()[row]);
      if (row_block == nullptr || columns < 1 || columns % row_block->inputs != 0) {
        throw std::invalid_argument("row " + std::to_string(row) + " must have whole blocks of a quantised type, got " +
                                    std::to_string(columns) + " columns of type " +
                                    std::to_string(types_bytes.data()[row]));
      }
      const int64_t row_bytes = columns / row_block->inputs * row_block->bytes;
      if (offsets[row] < 0 || row_bytes > file.size() || offsets[row] > file.size() - row_bytes) {
        throw std::invalid_argument("row " + std::to_string(row) + " must lie within the file's " +
                                    std::to_string(file.size()) + " bytes, got " + std::to_string(row_bytes) +
                                    " bytes at " + std::to_string(offsets[row]));
      }
      if (row > 0 && (row_block->bits != block->bits || row_block->has_mins != block->has_mins)) {
        throw std::invalid_argument("the rows' types must have one form, got " + std::to_string(types_bytes.data()[0]) +
                                    " and " + std::to_string(types_bytes.data()[row]));
      }
      block = row_block;
      packed_bits = std::max(packed_bits, block->packed_bits);
    }
    if (n == 0) throw std::invalid_argument("types must have at least one row");
  }

  Bytes file, offsets_bytes, types_bytes;
  int64_t n;
  const int64_t* offsets;
  const GGUFBlock* block;  // of the last row: integers and minimums are those of all rows
  int packed_bits = 0;     // the most of all rows
};

void check_size(const Bytes& bytes, const char* name, int64_t expected) {
  if (bytes.size() != expected) {
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) + " bytes, got " +
                                std::to_string(bytes.size()));
  }
}

bool unpack_rows(const py::buffer& file, const py::buffer& offsets, const py::buffer& types, int64_t columns,
                 bool packed, const py::buffer& q, const py::buffer& scales, const std::optional<py::buffer>& mins) {
  const Rows rows(file, offsets, types, columns);
  const Bytes to(q, "q", /*writable=*/true), to_scales(scales, "scales", /*writable=*/true);
  const int64_t padded = packed ? (rows.n + kTileRows - 1) / kTileRows * kTileRows : rows.n;
  const int64_t scale_bytes = to_scales.info.itemsize;
  if (scale_bytes != 2 && scale_bytes != 4) {
    throw std::invalid_argument("scales must be fp16 or fp32, got " + std::to_string(scale_bytes) + " bytes each");
  }
  check_size(to, "q", packed ? padded * columns * rows.packed_bits / 8 : padded * columns);
  check_size(to_scales, "scales", padded * (columns / kBlockInputs) * scale_bytes);
  if (mins.has_value() != rows.block->has_mins) {
    throw std::invalid_argument(rows.block->has_mins ? "mins must be a buffer, got None" : "mins must be None");
  }
  std::optional<Bytes> to_mins;
  if (mins) check_size(to_mins.emplace(*mins, "mins", /*writable=*/true), "mins", to_scales.size());
  const py::gil_scoped_release release;
  return cpu::unpack_gguf_rows({.file = rows.file.data(),
                                .offsets = rows.offsets,
                                .types = rows.types_bytes.data(),
                                .n = rows.n,
                                .k = columns,
                                .bits = rows.packed_bits,
                                .packed = packed,
                                .scale_dtype = scale_bytes == 2 ? DType::kFloat16 : DType::kFloat32,
                                .q = to.data(),
                                .scales = to_scales.data(),
                                .mins = to_mins ? to_mins->data() : nullptr});
}

void pack_two_level_rows(const py::buffer& file, const py::buffer& offsets, const py::buffer& types, int64_t columns,
                         const py::buffer& q, const py::buffer& scales, const std::optional<py::buffer>& mins) {
  const Rows rows(file, offsets, types, columns);
  const uint8_t type = rows.types_bytes.data()[0];
  const int bits = gguf_block(type)->two_level_bits;
  for (int64_t row = 0; row < rows.n; ++row) {
    if (bits == 0 || rows.types_bytes.data()[row] != type) {
      throw std::invalid_argument("types must be one type with two-level scales, got " + std::to_string(type) +
                                  " and " + std::to_string(rows.types_bytes.data()[row]));
    }
  }
  const Bytes to(q, "q", /*writable=*/true), to_scales(scales, "scales", /*writable=*/true);
  const int64_t tiles = (rows.n + kTileRows - 1) / kTileRows;
  const int64_t groups = bits == 6 ? TwoLevel<16>::kGroups : TwoLevel<32>::kGroups;
  check_size(to, "q", tiles * kTileRows * columns * bits / 8);
  check_size(to_scales, "scales", tiles * (columns / kTwoLevelInputs) * (2 + groups) * kTileRows);
  if (mins.has_value() != rows.block->has_mins) {
    throw std::invalid_argument(rows.block->has_mins ? "mins must be a buffer, got None" : "mins must be None");
  }
  std::optional<Bytes> to_mins;
  if (mins) check_size(to_mins.emplace(*mins, "mins", /*writable=*/true), "mins", to_scales.size());
  const py::gil_scoped_release release;
  cpu::pack_gguf_two_level({.file = rows.file.data(),
                            .offsets = rows.offsets,
                            .type = type,
                            .n = rows.n,
                            .k = columns,
                            .q = to.data(),
                            .scales = to_scales.data(),
                            .mins = to_mins ? to_mins->data() : nullptr});
}

void dequantize_rows(const py::buffer& file, const py::buffer& offsets, const py::buffer& types, int64_t columns,
                     const py::buffer& values) {
  const Rows rows(file, offsets, types, columns);
  const Bytes to(values, "values", /*writable=*/true);
  check_size(to, "values", rows.n * columns * 4);
  for (int64_t row = 0; row < rows.n; ++row) {
    const int type = rows.types_bytes.data()[row];
    if (!gguf_block(type)->groups_of_16) {
      throw std::invalid_argument("types must have groups of 16, got " + std::to_string(type));
    }
  }
  const py::gil_scoped_release release;
  cpu::dequantize_gguf_rows({.file = rows.file.data(),
                             .offsets = rows.offsets,
                             .types = rows.types_bytes.data(),
                             .n = rows.n,
                             .k = columns,
                             .values = reinterpret_cast<float*>(to.data())});
}

}  // namespace

void define_gguf(py::module_& m) {
  m.def("skip_strings", &skip_strings, py::arg("buffer"), py::arg("position"), py::arg("count"),
        "Step over up to `count` strings, each a length of 8 bytes and that many bytes, as long as they end within the "
        "contiguous buffer. Returns how many they were, and the position behind them; ValueError for a position "
        "outside.");
  m.def("read_strings", &read_strings, py::arg("buffer"), py::arg("position"), py::arg("count"),
        "As skip_strings, and as long as they are UTF-8: returns a list of them, and the position.");
  m.def("unpack_rows", &unpack_rows, py::arg("file"), py::arg("offsets"), py::arg("types"), py::arg("columns"),
        py::arg("packed"), py::arg("q"), py::arg("scales"), py::arg("mins"),
        "Unpack quantised rows of a GGUF file, at byte offsets (int64) and with type ids (uint8) of their own, on all "
        "threads, into contiguous buffers: row by row, or in the CPU's packed layout. Returns false, with results "
        "that are of no use, if a computed scale does not fit into fp16 scales; ValueError for sizes that do not fit.");
  m.def(
      "pack_two_level_rows", &pack_two_level_rows, py::arg("file"), py::arg("offsets"), py::arg("types"),
      py::arg("columns"), py::arg("q"), py::arg("scales"), py::arg("mins"),
      "Pack rows of one type whose blocks have an integer for each group and fp16 factors (Q4_K, Q5_K and Q6_K), "
      "on all threads, into contiguous buffers in the CPU's packed layout with two-level scales, without any rounding; "
      "ValueError for sizes that do not fit.");
  m.def("dequantize_rows", &dequantize_rows, py::arg("file"), py::arg("offsets"), py::arg("types"), py::arg("columns"),
        py::arg("values"), "As unpack_rows, for types with groups of 16: fp32 values, without any rounding.");
}

}  // namespace fastinfer
