#include "formats/gguf.h"

#include <bit>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "common/cpu/parallel.h"

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

struct Fields {
  const uint8_t* blocks;
  uint8_t* values;
  int64_t block_bytes, begin, end;
  int bits, shift;
};

// Unpacks the fields of some blocks. The length of a run is a constant, so that its bytes are moved by whole registers.
template <int kRun>
void take_fields(Fields p, int64_t first, int64_t last) {
  using Word = std::conditional_t<kRun % 8 == 0, uint64_t, uint16_t>;
  constexpr int kWords = kRun / sizeof(Word);
  const Word mask = static_cast<Word>(0x0101010101010101u * ((1u << p.bits) - 1));
  uint8_t* out = p.values + first * (p.end - p.begin) * (8 / p.bits);
  for (int64_t block = first; block < last; ++block) {
    for (int64_t byte = p.begin; byte < p.end; byte += kRun) {
      Word run[kWords];
      std::memcpy(run, p.blocks + block * p.block_bytes + byte, kRun);
      for (int bit = 0; bit < 8; bit += p.bits, out += kRun) {
        Word field[kWords];
        for (int i = 0; i < kWords; ++i) field[i] = static_cast<Word>((run[i] >> bit & mask) << p.shift);
        std::memcpy(out, field, kRun);
      }
    }
  }
}

void bit_fields(const py::buffer& values, const py::buffer& blocks, int64_t block_bytes, int64_t begin, int64_t end,
                int bits, int64_t run, int shift) {
  static const std::map<int64_t, void (*)(Fields, int64_t, int64_t)> kernels{{2, &take_fields<2>},
                                                                             {8, &take_fields<8>},
                                                                             {16, &take_fields<16>},
                                                                             {32, &take_fields<32>},
                                                                             {64, &take_fields<64>}};
  const Bytes to(values, "values", /*writable=*/true), from(blocks, "blocks");
  const auto kernel = kernels.find(run);
  if (kernel == kernels.end()) {
    throw std::invalid_argument("run must be 2, 8, 16, 32 or 64, got " + std::to_string(run));
  }
  if (bits != 1 && bits != 2 && bits != 4 && bits != 8) {
    throw std::invalid_argument("bits must be 1, 2, 4 or 8, got " + std::to_string(bits));
  }
  if (shift < 0 || shift + bits > 8) {
    throw std::invalid_argument("shift must be in 0.." + std::to_string(8 - bits) + ", got " + std::to_string(shift));
  }
  if (begin < 0 || end <= begin || end > block_bytes || (end - begin) % run != 0) {
    throw std::invalid_argument("begin and end must have whole runs of a block between them, got " +
                                std::to_string(begin) + " and " + std::to_string(end));
  }
  const int64_t count = from.size() / block_bytes, size = count * (end - begin) * (8 / bits);
  if (from.size() % block_bytes != 0 || to.size() != size) {
    throw std::invalid_argument("values must have " + std::to_string(size) + " bytes for whole blocks, got " +
                                std::to_string(to.size()) + " for blocks of " + std::to_string(from.size()));
  }
  const py::gil_scoped_release release;
  const Fields fields{from.data(), to.data(), block_bytes, begin, end, bits, shift};
  cpu::parallel_for(count, [&](int64_t first, int64_t last) { kernel->second(fields, first, last); });
}

}  // namespace

void define_gguf(py::module_& m) {
  m.def("skip_strings", &skip_strings, py::arg("buffer"), py::arg("position"), py::arg("count"),
        "Step over up to `count` strings, each a length of 8 bytes and that many bytes, as long as they end within the "
        "contiguous buffer. Returns how many they were, and the position behind them; ValueError for a position "
        "outside.");
  m.def("read_strings", &read_strings, py::arg("buffer"), py::arg("position"), py::arg("count"),
        "As skip_strings, and as long as they are UTF-8: returns a list of them, and the position.");
  m.def("bit_fields", &bit_fields, py::arg("values"), py::arg("blocks"), py::arg("block_bytes"), py::arg("begin"),
        py::arg("end"), py::arg("bits"), py::arg("run"), py::arg("shift"),
        "The work of fastinfer.formats.gguf_bit_fields.bit_fields, on all threads, from one contiguous buffer to "
        "another; "
        "ValueError for sizes that do not fit.");
}

}  // namespace fastinfer
