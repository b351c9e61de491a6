"""The kernels from C++: what the package installs for it is complete, stands alone, and the examples run on it."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
import pytest
from support.paths import ROOT

import fastinfer
from fastinfer import _C, cpp

pytestmark = pytest.mark.slow

HEADERS = sorted(Path(fastinfer.get_include()).rglob("*.h"))


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what examples/cpp builds."""
    folder = tmp_path_factory.mktemp("examples")
    options = {
        "CMAKE_BUILD_TYPE": "Debug",  # compiles in half the time
        "CMAKE_CXX_FLAGS": "-Wall -Wextra -Werror",
        "fastinfer_DIR": fastinfer.get_cmake_dir(),
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-G", "Ninja", "-S", ROOT / "examples" / "cpp", "-B", folder, *defined)
    run("cmake", "--build", folder)
    return folder


def exports() -> list[str]:
    lines = run("nm", "-DC", "--defined-only", fastinfer.get_library()).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def test_paths() -> None:
    assert (Path(fastinfer.get_include()) / "fastinfer" / "norm" / "rms_norm.h").is_file()
    assert Path(fastinfer.get_library()).is_file()
    assert (Path(fastinfer.get_cmake_dir()) / "fastinfer-config.cmake").is_file()


def test_paths_cost_no_import_of_torch() -> None:
    calls = "fastinfer.get_include(), fastinfer.get_library(), fastinfer.get_cmake_dir()"
    run(sys.executable, "-c", f"import sys, fastinfer; {calls}; assert not {{'torch', 'numpy'}} & set(sys.modules)")


def test_paths_of_a_package_that_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match="include is missing: fastinfer must be built first"):
        fastinfer.get_include()


def test_every_header_compiles_alone(tmp_path: Path) -> None:
    """Also where a project has files of the same names as csrc has."""
    for header in HEADERS:
        own = tmp_path / header.relative_to(Path(fastinfer.get_include(), "fastinfer"))
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("#error the project's own header\n")

    def compile_alone(header: Path) -> str:
        source = f"#include <{header.relative_to(fastinfer.get_include())}>\n"
        flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-"]
        command = ["g++", "-I", str(tmp_path), "-I", fastinfer.get_include(), *flags]
        return subprocess.run(command, input=source, capture_output=True, text=True).stderr

    assert len(HEADERS) > 30
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        assert "".join(pool.map(compile_alone, HEADERS)) == ""


def test_headers_are_those_of_the_launchers() -> None:
    names = [str(header.relative_to(Path(fastinfer.get_include()) / "fastinfer")) for header in HEADERS]
    assert {"gemm/gemm.h", "quant/pack.h", "common/cpu/parallel.h", "sampling/sample_plan.h"} <= set(names)
    assert [name for name in names if re.search(r"_(binding|cpu|cuda)\.h$|common/(binding|device)\.h", name)] == []


def test_library_needs_neither_torch_nor_python() -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", fastinfer.get_library()))
    assert {name.partition(".so")[0] for name in needed} <= {
        *("libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64", "ld-linux-aarch64"),
        *("libpthread", "libdl", "librt"),  # of an older glibc
    }
    undefined = run("nm", "-DC", "--undefined-only", fastinfer.get_library())
    assert re.findall(r"(?i).*(?:torch|aoti|c10|\bat::|\b_?Py[A-Z_]).*", undefined) == []


def test_library_exports_its_launchers_and_nothing_else() -> None:
    names = exports()
    assert [name for name in names if not name.startswith("fastinfer::")] == []
    functions = {name.partition("(")[0] for name in names}
    text = "".join(header.read_text() for header in HEADERS)
    kernels = re.findall(r"^FASTINFER_CPU_KERNEL(_BF16|_AMX)?(_TILES|_PROMPTS)?\((\w+),", text, re.MULTILINE)
    assert len(kernels) >= 20
    for bf16, tiles, kernel in kernels:
        some = {"avx512_bf16": bf16, "amx": tiles or bf16 == "_AMX"}
        isas = [isa for isa in _C.cpu_info()["isas_built"] if some.get(isa, True)]
        assert {f"fastinfer::cpu::{isa}::{kernel}" for isa in isas} <= functions
    assert {
        f"fastinfer::cpu::{name}" for name in ("pack", "dequantize", "permute_columns", "route_experts", "head_rows")
    } <= functions
    if _C.build_info()["cuda_archs"]:
        on_gpu = re.findall(r"^FASTINFER_API void (\w+)\(.*, void\* stream\);", text, re.MULTILINE)
        assert {f"fastinfer::cuda::{name}" for name in on_gpu} <= functions


@pytest.mark.parametrize("isa", _C.cpu_info()["isas_usable"])
def test_program(examples: Path, isa: str) -> None:
    assert re.match(rf"{isa}, 3 threads: ", run(examples / "int4_linear", FASTINFER_CPU_ISA=isa, OMP_NUM_THREADS="3"))


def test_extension_beside_the_operators(examples: Path) -> None:
    """Both extensions of a process use one library: its threads are the same."""
    code = """
import numpy, torch
import numpy_norm
import fastinfer.ops
from fastinfer import _C

x = numpy.random.default_rng(0).standard_normal((5, 70), dtype=numpy.float32)
weight = numpy.linspace(0.5, 2, 70, dtype=numpy.float32)
own = numpy_norm.rms_norm(x, weight, 1e-5)
reference = x / numpy.sqrt((x.astype(numpy.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
assert numpy.abs(own - reference).max() < 1e-5
operator = fastinfer.ops.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5)
assert (own == operator.numpy()).all()
_C.set_num_threads(3)
assert numpy_norm.num_threads() == 3
"""
    paths = os.pathsep.join([str(examples), str(Path(fastinfer.__file__).parents[1])])
    run(sys.executable, "-c", code, PYTHONPATH=paths)
