"""The emulator itself: its detectors catch planted faults, and its instructions do what the PTX manual says.

The instructions run on a GPU too, where there is one: the emulator and the hardware answer to the same statements.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.paths import ROOT
from support.sanitizers import OPTIONS, without_randomisation

from emulation import build

SHARED, GLOBAL = ("shared_bounds", "use-after-poison"), ("global_bounds", "heap-buffer-overflow")
RACES = [
    (name, "data race")
    for name in ("missing_barrier", "missing_warp_barrier", "missing_release_fence", "missing_acquire_fence")
]
STUCK = [
    ("divergent_barrier", "divergent barrier"),
    ("divergent_vote", "divergent barrier"),
    ("barrier_after_exit", "deadlock"),
    ("early_read", "trap"),
    ("missing_wait", "ends without grid_dependency_wait"),
]
PRODUCTS = [
    ("early_sums", "trap"),
    ("freed_stage", "trap"),
    ("missing_async_fence", "copies without fence_async_shared"),
]
BLOCKS = [("order_of_blocks", "trap"), ("shared_scratch", "trap")]
EARLY = [(name, "use-after-poison") for name in ("read_before_wait", "write_before_wait", "constant_before_wait")]
FAULTS = [
    *(("plain", *fault) for fault in [*STUCK, *PRODUCTS, *BLOCKS]),
    *(("address", *fault) for fault in [GLOBAL, SHARED, *STUCK, *EARLY]),
    *(("thread", *fault) for fault in [*RACES, *STUCK, ("shared_scratch", "data race")]),
]

Words = NDArray[np.uint32]
Lane = tuple[NDArray[np.int64], NDArray[np.int64]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing"),
]


# ---- planted faults ----


@functools.cache
def faults_program(sanitizer: str) -> str:
    return str(build.build(sanitizer, "faults") / "faults")


def run_fault(sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [faults_program(sanitizer), *arguments]
    if sanitizer == "thread":
        prefix = without_randomisation()
        if prefix is None:
            pytest.skip("ThreadSanitizer needs less address randomisation than this machine has")
        command = [*prefix, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | OPTIONS)


@pytest.mark.parametrize(("sanitizer", "fault", "message"), FAULTS)
def test_fault_is_caught_and_its_sound_twin_is_not(sanitizer: str, fault: str, message: str) -> None:
    caught = run_fault(sanitizer, fault, "faulty", "descending")
    assert caught.returncode in (1, 66)
    assert message in caught.stderr
    # The line where it happened.
    assert "faults.cu" in caught.stderr or sanitizer == "plain" or fault == "missing_wait"
    sound = run_fault(sanitizer, fault, "sound", "descending")
    assert (sound.returncode, sound.stderr) == (0, "")


def test_order_of_blocks() -> None:
    """Blocks that run in the order of their numbers do not show this fault."""
    orders = ["ascending", "descending", *(f"random:{seed}" for seed in range(8))]
    for order in orders:
        assert run_fault("plain", "order_of_blocks", "sound", order).returncode == 0
    caught = [run_fault("plain", "order_of_blocks", "faulty", order).returncode for order in orders]
    assert caught[:2] == [0, 1]
    assert set(caught[2:]) == {0, 1}


def test_unknown_order_of_blocks_is_refused() -> None:
    for order in ("backwards", "random:", "random:-1"):
        assert "unknown order" in run_fault("plain", "early_read", "sound", order).stderr


# ---- one set of instructions ----


def declarations(path: Path) -> dict[str, set[str]]:
    """Function names of a header with the types of their parameters, without the emulator's ``Site``."""
    text = re.sub(r"namespace detail \{.*?\n\}  // namespace detail", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r",?\s*Site site(?: = Site::current\(\))?", "", text)
    found: dict[str, set[str]] = {}
    pattern = (
        r"^(?:__device__ )?(?:inline )?(?:unsigned char\*|[\w:]+) (\w+)(?:<\w+>)?\(((?:[^()]|\([^()]*\))*)\) ?[{;]"
    )
    for name, parameters in re.findall(pattern, text, flags=re.MULTILINE):
        without_names = re.sub(r"/\*.*?\*/|\s+", " ", parameters).strip()
        found.setdefault(name, set()).add(without_names)
    return found


@pytest.mark.parametrize(("header", "instruction"), [("ptx.h", "mma"), ("wgmma.h", "wgmma")])
def test_kernels_find_the_same_instructions_on_the_emulator(header: str, instruction: str) -> None:
    real = declarations(ROOT / "csrc/common/cuda" / header)
    emulated = declarations(ROOT / "tests/emulation/common/cuda" / header)
    assert instruction in real
    emulated.pop("cp_async_bytes", None)  # what the emulator's copies share
    assert real == emulated


# ---- what the instructions do ----


@pytest.fixture(scope="module", params=["emulated", "cuda"])
def run_layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Words]:
    """Runs a kernel of tests/emulation/layouts.cu: its name, its input and the shape of its output."""
    if request.param == "emulated":
        library = build.build("plain", "layouts") / "liblayouts.so"
    else:
        if not torch.cuda.is_available() or shutil.which("nvcc") is None:
            pytest.skip("no CUDA device or no nvcc")
        library = tmp_path_factory.mktemp("layouts") / "liblayouts.so"
        # "native" would leave out the instructions that are Hopper's alone.
        build.build_layouts_by_nvcc(library, "sm_90a" if torch.cuda.get_device_capability() == (9, 0) else "native")
    run_kernel = ctypes.CDLL(str(library)).run_layout
    device = "cuda" if request.param == "cuda" else "cpu"

    def run(name: str, given: Words, shape: tuple[int, ...]) -> Words:
        inputs = torch.from_numpy(np.ascontiguousarray(given).view(np.int32)).to(device)
        out = torch.full(shape, -1, dtype=torch.int32, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (inputs, out)]
        assert run_kernel(name.encode(), *pointers) == 0
        if device == "cuda":
            torch.cuda.synchronize()
        return out.cpu().numpy().view(np.uint32)

    return run


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_what_a_gpu_runs_can_be_loaded_without_one(tmp_path: Path) -> None:
    library = tmp_path / "liblayouts.so"
    build.build_layouts_by_nvcc(library, "sm_80")
    assert ctypes.CDLL(str(library), mode=os.RTLD_NOW).run_layout


def words_of(values: torch.Tensor) -> Words:
    return values.contiguous().numpy().view(np.uint32) if values.element_size() == 4 else _words_of_small(values)


def _words_of_small(values: torch.Tensor) -> Words:
    bits = values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int8).numpy()
    return bits.view(np.uint32)


def fragments(bits: int) -> tuple[Lane, Lane, Lane]:
    """(row, column) of each lane's elements of A, B and D, in the words of the PTX ISA's chapters on mma.m16n8k8 with
    tf32, mma.m16n8k16 with 16-bit elements and mma.m16n8k32 with 8-bit ones."""
    run = 32 // bits  # consecutive elements in a register
    group_id, thread_in_group = np.divmod(np.arange(32)[:, None], 4)
    i = np.arange(4 * run)
    row = np.where(i // run % 2 == 0, group_id, group_id + 8)
    column = thread_in_group * run + i % run + np.where(i < 2 * run, 0, 4 * run)
    a = row, column
    i = np.arange(2 * run)
    row = thread_in_group * run + i % run + np.where(i < run, 0, 4 * run)
    b = row, group_id + 0 * i
    i = np.arange(4)
    d = np.where(i < 2, group_id, group_id + 8), thread_in_group * 2 + i % 2
    return a, b, d


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_mma(dtype: torch.dtype, run_layout: Callable[..., Words]) -> None:
    torch.manual_seed(0)
    a_at, b_at, d_at = fragments(8 * dtype.itemsize)
    inner, wide = 32 // dtype.itemsize, torch.int32 if dtype == torch.int8 else torch.float32
    # Small integers, so that every product and sum is exact.
    a, b, d = (
        torch.randint(-9, 10, shape).to(kind)
        for shape, kind in [((16, inner), dtype), ((inner, 8), dtype), ((16, 8), wide)]
    )
    given = np.concatenate([words_of(matrix[at]) for matrix, at in [(a, a_at), (b, b_at), (d, d_at)]], axis=1)
    out = run_layout(f"mma {str(dtype).removeprefix('torch.')}", given, (32, 4))
    expected = d.double() + a.double() @ b.double()
    assert np.array_equal(out, words_of(expected.to(wide)[d_at]))


@pytest.mark.parametrize(
    "name",
    [
        "float16 64",
        "bfloat16 128",
        "bfloat16 256",
        "float16 64 registers",
        "bfloat16 128 registers transposed",
        "float16 256 registers transposed",
        "int8 64",
        "int8 256",
    ],
)
def test_wgmma(name: str, run_layout: Callable[..., Words]) -> None:
    """Products [64, inner] x [inner, columns] of operands in rows of 128 bytes, whose 16-byte pieces are swizzled."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is an instruction of sm_90a")
    torch.manual_seed(0)
    dtype, columns = getattr(torch, name.split()[0]), int(name.split()[1])
    inner, wide = 128 // dtype.itemsize, torch.int32 if dtype == torch.int8 else torch.float32
    a, b = (torch.randint(-9, 10, shape).to(dtype) for shape in [(64, inner), (inner, columns)])
    # The rows of b go along k, or along 64 columns each, panel by panel.
    rows = b.reshape(64, -1, 64).transpose(0, 1).reshape(-1, 64) if "transposed" in name else b.T
    pieces = torch.cat([a, rows]).reshape(-1, 8, inner // 8)  # [row, piece, element]
    row, place = np.indices(pieces.shape[:2])
    given = words_of(pieces[row, place ^ row % 8])
    out = run_layout(f"wgmma {name}", given, (128, columns // 2))
    warp, g, t = (x[:, None] for x in (np.arange(128) // 32, np.arange(128) % 32 // 4, np.arange(128) % 4))
    j, h, e = (np.arange(columns // 2) // 4, np.arange(columns // 2) // 2 % 2, np.arange(columns // 2) % 2)
    expected = (a.double() @ b.double()).to(wide)[16 * warp + 8 * h + g, 8 * j + 2 * t + e]
    assert np.array_equal(out, words_of(expected))


@pytest.mark.parametrize(("name", "matrices"), [("ldmatrix 4", 4), ("ldmatrix 2", 2), ("ldmatrix 4 transposed", 4)])
def test_ldmatrix(name: str, matrices: int, run_layout: Callable[..., Words]) -> None:
    elements = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    out = run_layout(name, words_of(elements), (32, matrices))
    held = elements.mT if "transposed" in name else elements
    # Row l / 4, elements 2 (l % 4) and the next, of each matrix.
    expected = held[:matrices].reshape(matrices, 32, 2).permute(1, 0, 2)
    assert np.array_equal(out, words_of(expected)[..., 0])


def random_words(count: int) -> Words:
    return np.random.default_rng(0).integers(0, 2**32, (32, count), dtype=np.uint32)


@pytest.mark.parametrize(
    ("table", "function"),
    [
        (0xEA, lambda a, b, c: a & b | c),
        (0x6A, lambda a, b, c: a & b ^ c),
        (0x35, lambda a, b, c: (a & ~b) | (~a & ~c)),
    ],
)
def test_lop3(table: int, function: Callable[..., Words], run_layout: Callable[..., Words]) -> None:
    assert function(0xF0, 0xCC, 0xAA) & 0xFF == table
    given = random_words(3)
    assert np.array_equal(run_layout(f"lop3 {table:#x}", given, (32,)), function(*given.T))


def test_prmt(run_layout: Callable[..., Words]) -> None:
    given = random_words(3)
    given[0, 2] = 0x76543210 & 0xFFFF
    expected = []
    for a, b, selector in given.tolist():
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        picked = []
        for nibble in range(4):
            mode = selector >> (4 * nibble) & 0xF
            byte = source[mode & 7]
            picked.append((0xFF if byte & 0x80 else 0) if mode & 8 else byte)
        expected.append(int.from_bytes(bytes(picked), "little"))
    assert run_layout("prmt", given, (32,)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function"),
    [("fma2", lambda a, b, c: a * b + c), ("sub2", lambda a, b, c: a - b), ("mul2", lambda a, b, c: a * b)],
)
def test_packed_arithmetic(
    name: str, function: Callable[..., torch.Tensor], dtype: torch.dtype, run_layout: Callable[..., Words]
) -> None:
    torch.manual_seed(0)
    operands = torch.randn(32, 3, 2).to(dtype)
    out = run_layout(f"{name} {str(dtype).removeprefix('torch.')}", words_of(operands)[..., 0], (32,))
    expected = function(*operands.double().unbind(1)).to(dtype)  # exact in fp64, so rounded once
    assert np.array_equal(out, words_of(expected)[..., 0])


def test_shuffles(run_layout: Callable[..., Words]) -> None:
    given = random_words(1)[:, 0]
    lane = np.arange(32)
    first, position = lane // 8 * 8, lane % 8
    sources = [lane ^ 5, np.where(position < 3, lane, lane - 3), np.where(position > 4, lane, lane + 3), first + 3]
    out = run_layout("shuffle", given, (32, 5))
    assert np.array_equal(out[:, :4].T, given[np.stack(sources)])
    ballot = sum(1 << index for index in range(32) if given[index] & 1)
    assert (out[:, 4] == ballot).all()


def test_votes_of_a_block(run_layout: Callable[..., Words]) -> None:
    thread = np.arange(96, dtype=np.uint32)
    given = np.uint32(2) | np.where(thread == 70, 4, 0).astype(np.uint32)  # nobody, everybody, one in the third warp
    out = run_layout("vote", given, (96, 9))
    assert np.array_equal(out, np.tile([0, 0, 0, 1, 1, 96, 1, 0, 1], (96, 1)))


def test_cp_async_writes_zeros_for_what_it_does_not_read(run_layout: Callable[..., Words]) -> None:
    given = random_words(4)
    expected = given * (np.arange(32)[:, None] % 2 == 0)
    assert np.array_equal(run_layout("cp_async", given, (32, 4)), expected)
