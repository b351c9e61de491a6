"""Tiles of the launch policies, from a small program that is compiled with the kernels' own headers."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("tiles.cpp")
CSRC = Path(__file__).parents[2] / "csrc"


@dataclass(frozen=True)
class Tile:
    """One stage of a block's matrix product: rows (of weights or queries) by a chunk (of inputs or positions)."""

    rows: int
    chunk: int
    threads: int
    shared: int  # bytes of shared memory a block
    warpgroups: bool = False  # multiply, by wgmma

    @property
    def warps(self) -> int:
        return self.threads // 32


Tiles = dict[str, dict[int, Tile]]  # of one GPU: kernel and variant


def read_tiles(text: str) -> dict[str, Tiles]:
    return {
        gpu: {
            kernel: {int(variant): Tile(**tile) for variant, tile in variants.items()}
            for kernel, variants in kernels.items()
        }
        for gpu, kernels in json.loads(text).items()
    }


def compile_tiles(compiler: str = "c++") -> dict[str, Tiles]:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "tiles")
        subprocess.run([compiler, "-std=c++20", f"-I{CSRC}", str(SOURCE), "-o", program], check=True)
        return read_tiles(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
