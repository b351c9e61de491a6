"""The ceilings' loops do the work that they claim, on every instruction set; and the benchmark around them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bench_roofline
import numpy as np
import pytest
from support.helpers import num_threads

from fastinfer import _C

MEMORY = np.ones(1 << 16, dtype=np.uint8)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [0, 511, 512, 1536, 1 << 16])
def test_read_counts_whole_pieces_of_512_bytes(size: int, threads: int) -> None:
    with num_threads(threads):
        work, seconds = _C.roofline("read", MEMORY[:size], 5)
    assert work == size // threads // 512 * 512 * threads * 5
    assert seconds >= 0


@pytest.mark.parametrize("ceiling", ["byte_dot", "fp32_fma", "bf16_dot"])
def test_operations_are_proportional_to_passes_and_threads(ceiling: str) -> None:
    def work(threads: int, passes: int) -> float:
        with num_threads(threads):
            return _C.roofline(ceiling, MEMORY, passes)[0]

    one = work(1, 1)
    assert work(2, 3) == 6 * one
    if ceiling == "bf16_dot" and _C.cpu_info()["isa"] not in ("avx512_bf16", "amx"):
        assert one == 0
    else:
        assert one > 0


@pytest.mark.parametrize(("ceiling", "inputs"), [("bf16_tiles", 32), ("int8_tiles", 64)])
def test_tiles_are_measured_with_amx_alone(ceiling: str, inputs: int) -> None:
    with num_threads(2):
        work, _ = _C.roofline(ceiling, MEMORY, 3)
    operations = 2 * 1024 * 3 * 4 * 2 * 16 * 16 * inputs
    assert work == (operations if _C.cpu_info()["isa"] == "amx" else 0)


@pytest.mark.parametrize("isa", _C.cpu_info()["isas_usable"])
def test_every_instruction_set_has_its_own(isa: str) -> None:
    """Operations of a step follow from the width of a register: an addition and a multiplication per lane."""
    code = (
        "import torch; from fastinfer import _C;"
        "print(*(_C.roofline(name, b'', 1)[0] / 1024 / 12 for name in ('byte_dot', 'fp32_fma', 'bf16_dot')))"
    )
    environment = os.environ | {"FASTINFER_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    register = {"portable": 16, "avx2": 32}.get(isa, 64)
    byte_lanes = register // 2 if isa == "portable" else register  # the portable product is one of 16-bit numbers
    bf16_lanes = register // 2 if isa in ("avx512_bf16", "amx") else 0
    assert [float(word) for word in done.stdout.split()] == [2 * byte_lanes, 2 * register // 4, 2 * bf16_lanes]


@pytest.mark.parametrize(
    ("ceiling", "passes", "message"),
    [
        ("int8", 1, "ceiling must be read, byte_dot, fp32_fma, bf16_dot, bf16_tiles or int8_tiles, got 'int8'"),
        ("read", 0, "passes must be"),
    ],
)
def test_errors(ceiling: str, passes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.roofline(ceiling, MEMORY, passes)


def test_memory_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="memory must be contiguous"):
        _C.roofline("read", MEMORY[::2], 1)


def test_share_is_that_of_the_ceiling_measured_just_before() -> None:
    class Falling:
        resource = "read"
        values: Iterator[float] = iter([100.0, 50.0, 10.0])

        def sample(self) -> float:
            return next(self.values)

    kernel = bench_roofline.Kernel(lambda: 1.0, 5.0, Falling())  # type: ignore[arg-type]
    for _ in range(3):
        kernel.sample()
    assert kernel.per_s == [5.0] * 3
    assert kernel.share == [0.05, 0.1, 0.5]


def test_bench_roofline(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_roofline, "SAMPLE_S", 1e-3)
    with num_threads(_C.get_num_threads()):  # restores what the benchmark sets
        bench_roofline.main(["--rehearse", "--rounds=2", "--threads=1", f"--model={model_path}", f"--out={tmp_path}"])
    results = json.loads((tmp_path / "roofline.json").read_text())
    assert {"read from memory, 1 thread", "byte products, 1 thread", "fp32 FMA, 1 thread"} <= set(results["ceilings"])
    assert {"engine, decode", "engine, prefill of 16", "small layer, 1 token"} <= set(results["kernels"])
    for measured in (*results["ceilings"].values(), *results["kernels"].values()):
        assert min(measured["samples"]) > 0
    assert all(len(kernel["share_samples"]) == 2 for kernel in results["kernels"].values())
    assert results["settings"]["threads"] == 1
