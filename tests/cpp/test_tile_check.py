"""The check of the tile instructions finds planted faults and decides whether they are used: tile_check.cpp."""

import os
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

from fastinfer import _C


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not {"avx2", "fma", "f16c"} <= set(_C.cpu_info()["features"]):
        pytest.skip("tiles in software need AVX2")
    program = tmp_path_factory.mktemp("tile_check") / "program"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-mavx2", "-mfma", "-mf16c"]
    tiles = ["-DFASTINFER_ISA=amx_emulated", "-DFASTINFER_TILES", "-DFASTINFER_EMULATED_TILES"]
    sources = ["-I", ROOT / "csrc", ROOT / "tests" / "cpp" / "tile_check.cpp", "-o", program]
    subprocess.run(["g++", *flags, *tiles, *sources], check=True)
    return program


def output(*command: str | Path, isa: str = "") -> str:
    environment = os.environ | {"FASTINFER_CPU_ISA": isa}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_planted_faults_are_found(program: Path) -> None:
    output(program)


FAULT = "fails its self-check on this CPU: tdpbf16ps gave 0x"
REFUSAL = "needs tiles, which the operating system refuses (No space left on device)"


@pytest.mark.parametrize(
    ("tiles", "isa", "chosen"),
    [
        ("right", "", "amx: the best that was built"),
        ("right", "amx", "amx: set by FASTINFER_CPU_ISA"),
        ("wrong", "", f"avx512_bf16: amx {FAULT}"),
        ("wrong", "amx", f"FASTINFER_CPU_ISA=amx: it {FAULT}"),
        ("refused", "", f"avx512_bf16: amx {REFUSAL}"),
        ("refused", "amx", f"FASTINFER_CPU_ISA=amx: it {REFUSAL}"),
        ("wrong", "avx512_bf16", "avx512_bf16: set by FASTINFER_CPU_ISA; did not ask for tiles"),
    ],
)
def test_tiles_are_used_where_they_are_permitted_and_right(program: Path, tiles: str, isa: str, chosen: str) -> None:
    found = output(program, tiles, isa=isa)
    assert found.startswith(chosen)
    assert "\n" not in found
