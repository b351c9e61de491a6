"""The wrappers of CPU instructions, emulated and real, against statements in numpy of what Intel's manual says."""

import ctypes
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.paths import ROOT

from emulation import build
from fastinfer import _C

VECTORS = 500
BYTES = 64 * VECTORS
SETS = ["emulated", "avx2", "avx512_vnni", "avx512_bf16"]

Array = NDArray[Any]


@pytest.fixture(scope="module", params=SETS)
def run_instruction(request: pytest.FixtureRequest) -> Callable[..., Array]:
    """Runs one wrapper on the bytes of its arguments; skips where this build does not have it."""
    if request.param != "emulated" and request.param not in _C.cpu_info()["isas_usable"]:
        pytest.skip(f"this CPU cannot run {request.param}")
    target = f"instructions_{request.param}"
    function = ctypes.CDLL(str(build.build_avx512(target) / f"lib{target}.so")).run_instruction
    function.restype = ctypes.c_bool

    def run(name: str, out_type: type, vectors: int, *arguments: Array) -> Array:
        out = np.zeros(BYTES, np.uint8)
        padded = [np.ascontiguousarray(argument) for argument in arguments] + [out] * (3 - len(arguments))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*padded, out)]
        if not function(name.encode(), *pointers, ctypes.c_int64(vectors)):
            assert request.param != "emulated"
            pytest.skip(f"{request.param} has no {name}")
        return out.view(out_type)

    return run


def integers(dtype: type, seed: int) -> Array:
    """Random integers, a third of them the most extreme ones, whole vectors of those included."""
    random = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    count = BYTES // np.dtype(dtype).itemsize
    values = random.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    extreme = random.choice(np.array([limits.min, limits.max, 0, 1], dtype), count)
    values = np.where(random.random(count) < 1 / 3, extreme, values)
    run = count // VECTORS
    for i, limit in enumerate((limits.min, limits.max)):
        values[i * run : (i + 1) * run] = limit
        values[(2 + i) * run : (3 + i) * run] = limits.min if (i + seed) % 2 else limits.max
    return values


def groups(products: Array, size: int) -> Array:
    return products.reshape(-1, size).sum(1)


def test_maddubs_saturates(run_instruction: Callable[..., Array]) -> None:
    a, b = integers(np.uint8, 0), integers(np.int8, 1)
    exact = groups(a.astype(np.int64) * b, 2)
    assert exact.max() > 32767, "the data reach saturation"
    assert exact.min() < -32768
    out = run_instruction("maddubs 256", np.int16, 2 * VECTORS, a, b)
    np.testing.assert_array_equal(out, exact.clip(-32768, 32767))


def test_madd(run_instruction: Callable[..., Array]) -> None:
    a, b = integers(np.int16, 0), integers(np.int16, 2)
    exact = groups(a.astype(np.int64) * b, 2)
    assert exact.max() == 2**31, "the one case that wraps"
    out = run_instruction("madd 256", np.int32, 2 * VECTORS, a, b)
    np.testing.assert_array_equal(out, exact.astype(np.int32))


def test_dpbusd_does_not_saturate(run_instruction: Callable[..., Array]) -> None:
    a, b, total = integers(np.uint8, 0), integers(np.int8, 1), integers(np.int32, 2)
    exact = total + groups(a.astype(np.int64) * b, 4)
    assert exact.max() > 2**31
    assert exact.min() < -(2**31)
    out = run_instruction("dpbusd 512", np.int32, VECTORS, a, b, total)
    np.testing.assert_array_equal(out, exact.astype(np.int32))


def test_dpbusd_of_a_broadcast_word(run_instruction: Callable[..., Array]) -> None:
    a, b, total = integers(np.uint8, 0), integers(np.int8, 1), integers(np.int32, 2)
    words = b[: 4 * VECTORS].reshape(VECTORS, 1, 4).astype(np.int64)  # one for the 16 lanes of a vector
    exact = total + (a.reshape(VECTORS, 16, 4) * words).sum(2).reshape(-1)
    out = run_instruction("dpbusd broadcast 512", np.int32, VECTORS, a, b, total)
    np.testing.assert_array_equal(out, exact.astype(np.int32))


@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize("name", ["max", "min"])
def test_of_a_nan_or_two_zeros_the_second_remains(name: str, bits: int, run_instruction: Callable[..., Array]) -> None:
    random = np.random.default_rng(0)
    numbers = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan], np.float32)
    a, b = random.choice(numbers, (2, BYTES // 4))
    expected = np.where(a > b if name == "max" else a < b, a, b)
    out = run_instruction(f"{name} {bits}", np.float32, BYTES * 8 // bits, a, b)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("bits", [256, 512])
def test_fused_multiply_add_rounds_once(run_instruction: Callable[..., Array], bits: int) -> None:
    a, b = integers(np.int32, 0) >> 8, integers(np.int32, 1) >> 20  # 24 bits by 12: the product needs 36
    a, b = a.astype(np.float32), b.astype(np.float32)
    total = np.float32(-3 * 2.0**22) * b
    exact = a.astype(np.float64) * b + total
    out = run_instruction(f"fused_multiply_add {bits}", np.float32, BYTES * 8 // bits, a, b, total)
    np.testing.assert_array_equal(out, exact.astype(np.float32))
    assert (out != a * b + total).any(), "rounding twice gives something else"


def test_sign(run_instruction: Callable[..., Array]) -> None:
    a, b = integers(np.int8, 0), integers(np.int8, 1)
    expected = np.where(b == 0, 0, np.where(b < 0, -a.astype(np.int64), a)).astype(np.int8)
    np.testing.assert_array_equal(run_instruction("sign 256", np.int8, BYTES // 32, a, b), expected)


@pytest.mark.parametrize("bits", [256, 512])
def test_shuffle_bytes(bits: int, run_instruction: Callable[..., Array]) -> None:
    v, index = integers(np.uint8, 0), integers(np.uint8, 1)
    found = np.take_along_axis(v.reshape(-1, 16), index.reshape(-1, 16).astype(np.int64) % 16, axis=1)
    expected = np.where(index < 128, found.reshape(-1), 0)
    out = run_instruction(f"shuffle_bytes {bits}", np.uint8, BYTES * 8 // bits, v, index)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bits", [256, 512])
def test_widen(bits: int, run_instruction: Callable[..., Array]) -> None:
    a = integers(np.uint16, 0)[: BYTES // 4]
    np.testing.assert_array_equal(run_instruction(f"widen {bits}", np.uint32, BYTES * 8 // bits, a), a)


@pytest.mark.parametrize("bits", [256, 512])
def test_widen_bytes(bits: int, run_instruction: Callable[..., Array]) -> None:
    a = integers(np.int8, 0)[: BYTES // 4]
    np.testing.assert_array_equal(run_instruction(f"widen bytes {bits}", np.int32, BYTES * 8 // bits, a), a)


def floats(seed: int) -> Array:
    """fp32 of every magnitude, with infinities, NaN, denormals and what lies between two values of fp16."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 2**32, BYTES // 4, dtype=np.uint32).view(np.float32)
    small = random.standard_normal(BYTES // 4).astype(np.float32)
    values = np.where(random.random(BYTES // 4) < 0.5, small, values)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 65504, 65519.996, 65520, 2**-24, 2**-25, 6e-8]
    values[:14] = special
    values[14:16] = 1 + 2**-11, 1 + 3 * 2**-11  # ties: to even is down, then up
    return values


@pytest.mark.parametrize("bits", [256, 512])
def test_half_to_float(bits: int, run_instruction: Callable[..., Array]) -> None:
    halves = np.resize(np.arange(2**16, dtype=np.uint16), BYTES // 4)
    halves[:4096] = np.arange(0, 2**16, 16, dtype=np.uint16)  # every exponent, also with few vectors
    out = run_instruction(f"half_to_float {bits}", np.float32, BYTES * 8 // bits, halves)
    np.testing.assert_array_equal(out, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("bits", [256, 512])
def test_float_to_half(bits: int, run_instruction: Callable[..., Array]) -> None:
    a = floats(0)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = a.astype(np.float16)
    out = run_instruction(f"float_to_half {bits}", np.float16, BYTES * 8 // bits, a)[: BYTES // 4]
    np.testing.assert_array_equal(out, expected)
    assert (np.signbit(out) == np.signbit(expected))[~np.isnan(expected)].all()


def flush(x: np.float32) -> np.float32:
    return np.copysign(np.float32(0), x) if abs(x) < np.float32(2.0**-126) else x


def nearest(exact: Fraction) -> np.float32:
    """fp32 to nearest, ties to even."""
    if abs(exact) >= Fraction(2) ** 128:
        return np.float32(np.inf if exact > 0 else -np.inf)
    near = np.float32(float(exact))
    if np.isinf(near):
        return near
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [value for value in around if np.isfinite(value)]
    return min(finite, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.uint32)) & 1))


def multiply_add(a: np.float32, b: np.float32, total: np.float32) -> np.float32:
    if not np.isfinite([a, b, total]).all() or (a == 0 or b == 0):
        return np.float32(np.float64(a) * np.float64(b) + np.float64(total))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(total))
    return flush(nearest(exact)) if exact else np.float32(0)


@pytest.mark.parametrize("bits", [256, 512])
def test_dpbf16_rounds_twice_and_flushes_denormals(bits: int, run_instruction: Callable[..., Array]) -> None:
    a, b = ((floats(seed).view(np.uint32) >> 16).astype(np.uint16) for seed in (1, 2))
    a, b, total = np.resize(a, BYTES // 2), np.resize(b, BYTES // 2), floats(3)
    lanes = 1600  # those that are checked: exact fractions are slow
    total[20:30] = 1e-38, -1e-38, 1e-39, 2e-38, -2e-38, 1.2e-38, 5e-39, 1, -1, 0
    out = run_instruction(f"dpbf16 {bits}", np.float32, BYTES * 8 // bits, a, b, total)
    wide_a, wide_b = ((x.astype(np.uint32) << 16).view(np.float32).reshape(-1, 2) for x in (a, b))
    with np.errstate(all="ignore"):
        for i in range(lanes):
            (a0, a1), (b0, b1) = map(flush, wide_a[i]), map(flush, wide_b[i])
            expected = multiply_add(a0, b0, multiply_add(a1, b1, flush(total[i])))
            assert out[i] == expected or (np.isnan(out[i]) and np.isnan(expected)), (i, a0, b0, a1, b1, total[i])


def test_float_to_bf16(run_instruction: Callable[..., Array]) -> None:
    """To nearest, ties to even; denormals become zero, NaNs quiet."""
    low, high = (integers(np.uint32, seed) for seed in (0, 1))
    low[:6] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x807FFFFF, 0x7F800001, 0xFF800000
    out = run_instruction("float_to_bf16 512", np.uint16, VECTORS, low, high).reshape(VECTORS, 2, 16)
    assert out[0, 0, :6].tolist() == [0x3F80, 0x3F82, 0x7F80, 0x8000, 0x7FC0, 0xFF80]
    bits = np.stack([low.reshape(VECTORS, 16), high.reshape(VECTORS, 16)], axis=1).astype(np.uint64)
    bits = np.where((bits & 0x7F800000) == 0, bits & 0x80000000, bits)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(out, np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16))


def declarations(path: Path) -> set[tuple[str, str]]:
    found = re.findall(r"^FASTINFER_INLINE \w+ (\w+)\(([^)]*)\)", path.read_text(), flags=re.MULTILINE)
    return set(found)


def test_kernels_find_the_same_instructions_under_emulation() -> None:
    real = declarations(ROOT / "csrc/common/cpu/intrinsics.h")
    assert ("dpbusd", "i32x16 sum, u8x64 a, i8x64 b") in real
    assert real == declarations(ROOT / "tests/emulation/avx512/common/cpu/intrinsics.h")


def test_only_the_wrappers_use_intrinsics() -> None:
    users = [
        path
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cpp") and re.search(r"\b_mm\d*_|immintrin|__AVX|__F16C__|__FMA__", path.read_text())
    ]
    assert users == [ROOT / "csrc/common/cpu/intrinsics.h"]
