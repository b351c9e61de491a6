"""Every instruction set that can be used here computes what the default one does.

The choice is made at import, so that each runs in a process of its own: this file is also its script.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import assert_bitwise
from support.op_calls import op_calls
from torch import Tensor

from fastinfer import _C

pytestmark = pytest.mark.slow

ISAS = ["portable", "avx2", "avx512_vnni", "avx512_bf16", "amx"]
USABLE = _C.cpu_info()["isas_usable"]
EIGHT_BITS = " with 8-bit activations"


def outputs(namespace: str = "fastinfer") -> list[tuple[str, list[Tensor]]]:
    """Every operator's results, in-place ones included."""
    results = []
    for name, args in op_calls(seed=2):  # with which no activation rounds differently
        returned = getattr(getattr(torch.ops, namespace), name).default(*args)
        returned = returned if isinstance(returned, tuple) else (returned,)
        if "gemm" in name and isinstance(args[-1], int) and args[-1] == 8:
            name += EIGHT_BITS
        results.append((name, [t for t in (*returned, *args) if isinstance(t, Tensor)]))
    return results


def run(*command: str | Path, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    """A Python program under FASTINFER_CPU_ISA, or under what this process runs under."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if isa is not None:
        environment["FASTINFER_CPU_ISA"] = isa
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@cache
def cpu_info(isa: str) -> dict[str, Any]:
    """As a process under FASTINFER_CPU_ISA sees it, which does not hide anything where it is empty."""
    done = run("-c", "import json, torch; from fastinfer import _C; print(json.dumps(_C.cpu_info()))", isa=isa)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def default_outputs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[Tensor]]]:
    path = tmp_path_factory.mktemp("isa") / "default.pt"
    done = run(__file__, path)
    assert done.returncode == 0, done.stderr
    return torch.load(path)["outputs"]


@pytest.mark.parametrize("isa", ISAS)
def test_isa_gives_the_default_results(
    isa: str, default_outputs: list[tuple[str, list[Tensor]]], tmp_path: Path
) -> None:
    if isa not in USABLE:
        pytest.skip(f"{isa} cannot be used here")
    done = run(__file__, tmp_path / "out.pt", isa=isa)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "out.pt")
    assert saved["isa"] == isa
    assert_all_near(saved["outputs"], default_outputs)


@pytest.mark.usefixtures("avx512_library")
def test_emulated_avx512_gives_the_default_results(default_outputs: list[tuple[str, list[Tensor]]]) -> None:
    assert_all_near(outputs("fastinfer_avx512"), default_outputs)


def assert_all_near(results: list[tuple[str, list[Tensor]]], wanted: list[tuple[str, list[Tensor]]]) -> None:
    for (name, got), (_, want) in zip(results, wanted, strict=True):
        for out, expected in zip(got, want, strict=True):
            assert_near(name, out, expected)


def assert_near(name: str, out: Tensor, expected: Tensor) -> None:
    """Moves and integers bitwise; arithmetic to one step of its dtype, and in the mean to much less.

    One activation in 50,000 may round to int8 differently, and one result in a thousand to bf16. With AVX-512 VNNI sums
    of products with 8-bit activations lose something as well (ByteRun in csrc/common/cpu/dot.h): up to 2.5e-3 of the
    mean result, over 60 seeds of the calls.
    """
    assert out.dtype == expected.dtype
    step = torch.finfo(out.dtype).eps if out.is_floating_point() else 0.0
    if not out.is_floating_point() or "pack" in name or "dequantize" in name or name == "store_kv_cache":
        assert_bitwise(out, expected)
        return
    if not out.numel():
        assert out.shape == expected.shape
        return
    out, expected = out.double(), expected.double()
    mean, is_lossy = float(expected.abs().mean()), EIGHT_BITS in name
    torch.testing.assert_close(out, expected, rtol=max(step, 2e-5), atol=3e-3 * mean if is_lossy else 2e-4)
    assert (out - expected).abs().mean() <= (1e-3 if is_lossy else 2e-4) * mean


def test_portable_is_always_usable() -> None:
    assert "portable" in USABLE
    assert set(USABLE) <= set(ISAS)


@pytest.mark.parametrize("isa", USABLE)
def test_the_named_set_is_the_best_that_is_usable(isa: str) -> None:
    """A machine under FASTINFER_CPU_ISA stands in for an older one; what the CPU has is told as it is."""
    info = cpu_info(isa)
    assert info["isa"] == isa
    assert info["isas_usable"] == ISAS[: ISAS.index(isa) + 1]
    assert info["features"] == _C.cpu_info()["features"]
    assert info["isas_built"] == _C.cpu_info()["isas_built"]


@pytest.mark.parametrize("isa", ["avx9", "AVX2 ", *ISAS])
def test_unknown_or_unsupported_isa_is_an_error_at_import(isa: str) -> None:
    if isa in cpu_info("")["isas_usable"]:  # an empty variable counts as unset
        assert cpu_info(isa)["isa"] == isa
        return
    done = run("-c", "import fastinfer.ops", isa=isa)
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    assert "FASTINFER_CPU_ISA" in last_line
    assert isa in last_line
    if isa not in ISAS:
        assert all(known in last_line for known in ISAS), "the message lists what could be chosen"


if __name__ == "__main__":
    torch.save({"isa": _C.cpu_info()["isa"], "outputs": outputs()}, sys.argv[1])
