// The check of the tile instructions, with tiles in software in the place of the CPU's, and the choice of the
// instruction set that follows from it on a CPU that has everything. Run by test_tile_check.py. Without arguments all
// faults are planted, one after the other, and it exits with 0 if each is found. With "right", "wrong" or "refused" the
// CPU's tiles are such ones, and it prints the chosen set and the reason.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "common/cpu/tile_check.cpp"
#include "faulty_tiles.h"

namespace {

std::string tiles_of_cpu;
bool asked = false;

long arch_prctl(long code, long feature) {
  asked = code == 0x1023 && feature == 18;
  errno = ENOSPC;
  return tiles_of_cpu == "refused" ? -1 : 0;
}

}  // namespace

#define __builtin_cpu_supports(feature) 1
#define syscall(number, ...) arch_prctl(__VA_ARGS__)
#include "common/cpu/isa.cpp"

void amx::check_tiles(const TileCheckInputs& in, TileCheckResults& out) {
  tiles_of_cpu == "right" ? run_tile_check<Right>(in, out) : run_tile_check<Swapped>(in, out);
}

void amx_emulated::check_tiles(const TileCheckInputs& in, TileCheckResults& out) {
  run_tile_check<Right>(in, out);
}

namespace {

template <class Tiles>
void expect(const char* name, const std::string& reason) {
  const std::string found = tile_difference(run_tile_check<Tiles>, run_tile_check<Right>);
  if (reason.empty() ? found.empty() : found.starts_with(reason)) return;
  std::fprintf(stderr, "%s: expected '%s', got '%s'\n", name, reason.c_str(), found.c_str());
  std::exit(1);
}

#define EXPECT(type, reason) expect<type>(#type, reason)

void find_faults() {
  EXPECT(Right, "");
  EXPECT(Sums<Fault::kNone>, "");
  EXPECT(Sums<Fault::kTinyUnbounded>, "");
  EXPECT(Sums<Fault::kProductsFlushed>, "tdpbf16ps gave 0x");
  EXPECT(Sums<Fault::kOneChain>, "tdpbf16ps gave 0x");
  EXPECT(Sums<Fault::kChainFromBefore>, "tdpbf16ps gave 0x");
  EXPECT(Sums<Fault::kDenormalArguments>, "tdpbf16ps gave 0x");
  EXPECT(Sums<Fault::kDenormalResults>, "tdpbf16ps gave 0x");
  EXPECT(Sums<Fault::kTruncated>, "tdpbf16ps gave 0x");
  EXPECT(Swapped, "tdpbf16ps gave 0x");
  EXPECT(IgnoresStride, "tileloadd and tilestored gave other bytes");
  EXPECT(StoresFifteenRows, "tileloadd and tilestored gave other bytes");
  EXPECT(StoresTooMuch, "tileloadd and tilestored gave other bytes");
  EXPECT(KeepsTileSeven, "tilezero gave 0x");
  EXPECT(UnsignedBytes, "tdpbssd gave 0x");
  EXPECT(Saturated, "tdpbssd gave 0x");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    find_faults();
    return 0;
  }
  tiles_of_cpu = argv[1];
  try {
    const IsaChoice& choice = active_isa();
    std::printf("%s: %s", name(choice.isa), choice.reason.c_str());
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
  }
  std::printf("%s\n", asked ? "" : "; did not ask for tiles");
}
