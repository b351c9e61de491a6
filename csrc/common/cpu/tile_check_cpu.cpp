#include "common/cpu/tile_check.h"

#include "common/cpu/tiles.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void check_tiles(const TileCheckInputs& in, TileCheckResults& out) {
  run_tile_check<Tiles>(in, out);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
