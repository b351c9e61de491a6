"""Packing and dequantising, bitwise."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, device_fixture
from support.quantized_gemm import random_weight

from fastinfer import ops
from fastinfer.ops.pack import interleave_gate_up

device = device_fixture("cpu", "cuda", "emulated")

PACK = {4: ops.int4_pack, 5: ops.int5_pack, 6: ops.int6_pack, 8: ops.int8_pack}
LAYOUT = {
    "cpu": {4: reference.int4_pack, 8: reference.int8_pack},
    "cuda": {4: reference.int4_pack_fragments, 8: reference.int8_pack_fragments},
}
DEQUANTIZE = {4: ops.int4_dequantize, 8: ops.int8_dequantize}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("in_features", [32, 64, 576])
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 100])
def test_pack(out_features: int, in_features: int, bits: int, device: str, request: pytest.FixtureRequest) -> None:
    q = random_weight(bits, out_features, in_features, device=device).q
    layout = LAYOUT["cpu" if request.node.callspec.params["device"] == "cpu" else "cuda"][bits]
    assert_bitwise(PACK[bits](q), layout(q))


def test_layout_spelled_out() -> None:
    """One value at a time lands where the documentation says."""
    for row, column, place, shift in [
        (0, 0, (0, 0, 0, 0, 0), 0),
        (17, 32, (1, 1, 0, 1, 0), 0),
        (2, 5, (0, 0, 0, 2, 1), 4),
        (31, 63, (1, 1, 3, 15, 3), 4),
    ]:
        q = torch.zeros(32, 64, dtype=torch.uint8)
        q[row, column] = 9
        packed = ops.int4_pack(q)
        assert packed[place] == 9 << shift
        assert packed.count_nonzero() == 1
    q = torch.zeros(32, 64, dtype=torch.int8)
    q[17, 32 + 13] = -9
    packed = ops.int8_pack(q)
    assert packed[1, 1, 3, 1, 1] == -9
    assert packed.count_nonzero() == 1
    q = torch.full((32, 64), -32, dtype=torch.int8)
    q[17, 32 + 16 + 13] = -32 + 0b101011
    packed = ops.int6_pack(q)
    assert packed[1, 1, 3, 1, 1] == 0b1011 << 4
    assert packed[1, 1, 5, 1, 1] == 0b10 << 6
    assert packed.count_nonzero() == 2
    q = torch.zeros(32, 64, dtype=torch.uint8)
    q[17, 32 + 16 + 13] = 0b11011
    packed = ops.int5_pack(q)
    assert packed[1, 1, 3, 1, 1] == 0b1011 << 4
    assert packed[1, 1, 4, 1, 1] == 1 << 7
    assert packed.count_nonzero() == 2


@pytest.mark.parametrize("in_features", [32, 64, 576])
@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 100])
def test_pack_5_and_6_bits(out_features: int, in_features: int) -> None:
    five = torch.randint(0, 32, (out_features, in_features), dtype=torch.uint8)
    assert_bitwise(ops.int5_pack(five), reference.int5_pack(five))
    six = torch.randint(-32, 32, (out_features, in_features), dtype=torch.int8)
    assert_bitwise(ops.int6_pack(six), reference.int6_pack(six))


@pytest.mark.parametrize("value", [-128, -33, 32, 64, 127])
def test_what_does_not_fit_into_6_bits(value: int) -> None:
    q = torch.zeros(17, 64, dtype=torch.int8)
    q[16, 63] = value
    with pytest.raises(RuntimeError, match=r"int6_pack: q must be -32\.\.31 throughout"):
        ops.int6_pack(q)


@pytest.mark.parametrize(("bits", "value"), [(4, 16), (4, 255), (5, 32), (5, 64), (5, 128), (5, 255)])
def test_what_does_not_fit_into_4_or_5_bits(bits: int, value: int) -> None:
    q = torch.zeros(17, 64, dtype=torch.uint8)
    q[16, 63] = value
    with pytest.raises(RuntimeError, match=rf"int{bits}_pack: q must be 0\.\.{2**bits - 1} throughout"):
        PACK[bits](q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "mins"), [(4, False), (4, True), (5, False), (5, True), (6, False)])
@pytest.mark.parametrize("out_features", [1, 17, 48])
def test_dequantize_two_level_scales(out_features: int, bits: int, mins: bool, dtype: torch.dtype) -> None:
    weight = random_weight(bits, out_features, 768, mins=mins, two_level=True)
    dequantize = getattr(ops, f"int{bits}_dequantize")
    rows = torch.tensor([out_features - 1, 0, out_features // 2])
    for index in (None, rows):
        expected = weight.dense if index is None else weight.dense[index]
        assert_bitwise(dequantize(**weight.packed, rows=index, dtype=dtype), expected.to(dtype))


def test_pack_two_level_scales() -> None:
    integers, factors = torch.randint(-128, 128, (17, 32), dtype=torch.int8), torch.randn(17, 2).half()
    packed = ops.pack_two_level_scales(integers, factors)
    assert packed.shape == (2, 2, 18, 16)
    for row in range(32):
        for block in range(2):
            numbers = packed[row // 16, block]
            factor = numbers[:2].flatten().view(torch.float16)[row % 16]
            assert factor == (factors[row, block] if row < 17 else 0)
            expected = integers[row, 16 * block :][:16] if row < 17 else torch.zeros(16, dtype=torch.int8)
            assert_bitwise(numbers[2:, row % 16].contiguous(), expected)


@pytest.mark.parametrize(
    ("integers", "factors", "message"),
    [
        (torch.zeros(17, 16), torch.ones(17, 1).half(), r"integers must be .* got \(17, 16\) torch.float32"),
        (torch.zeros(16).char(), torch.ones(17, 1).half(), r"integers must be .* got \(16,\) torch.int8"),
        (torch.zeros(17, 16).char(), torch.ones(17, 1), r"factors must be .* got \(17, 1\) torch.float32"),
        (torch.zeros(17, 16).char(), torch.ones(16, 1).half(), r"factors must be \[17, .* got \(16, 1\)"),
        (torch.zeros(17, 16).char(), torch.ones(17, 3).half(), r"divide the 16 groups, got \(17, 3\)"),
        (torch.zeros(17, 16).char(), torch.ones(17, 0).half(), r"divide the 16 groups, got \(17, 0\)"),
    ],
)
def test_two_level_scales_that_do_not_fit(integers: torch.Tensor, factors: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.pack_two_level_scales(integers, factors)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 192])
@pytest.mark.parametrize("out_features", [1, 17, 48])
def test_dequantize(
    out_features: int, group: int, scale_dtype: torch.dtype, mins: bool, bits: int, device: str
) -> None:
    weight = random_weight(bits, out_features, 192, group, scale_dtype, mins, device)
    out = DEQUANTIZE[bits](**weight.packed)
    if scale_dtype == torch.float16 or not mins:  # scale * q is exact or all there is: one rounding, however computed
        assert_bitwise(out, weight.dense)
    else:  # a fused multiply-add rounds once, the reference twice
        torch.testing.assert_close(out, weight.dense, rtol=2e-7, atol=2e-8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rows_and_dtypes(dtype: torch.dtype, bits: int, device: str) -> None:
    weight = random_weight(bits, 100, 576, device=device)
    for rows in ([], [99], [5, 5, 0, 99, 17, 16, 15]):
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        assert_bitwise(DEQUANTIZE[bits](**weight.packed, rows=index, dtype=dtype), weight.dense[index].to(dtype))


@pytest.mark.emulated
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_rows_that_do_not_exist_are_nan_on_a_gpu(bits: int, device: str) -> None:
    """A host cannot look at indices on a GPU; the kernel must not follow them."""
    weight = random_weight(bits, 17, 64, device=device)
    out = DEQUANTIZE[bits](**weight.packed, rows=torch.tensor([17, -1, 3, 1 << 40], device=device))
    assert out[[0, 1, 3]].isnan().all()
    assert_bitwise(out[2], weight.dense[3])


def test_pack_scales() -> None:
    scales = torch.arange(34.0).view(17, 2)
    packed = ops.pack_scales(scales)
    assert packed.shape == (2, 2, 16)
    for row in range(32):
        for group in range(2):
            assert packed[row // 16, group, row % 16] == (scales[row, group] if row < 17 else 0)
    out = torch.full((3, 2, 16), torch.nan)
    assert ops.pack_scales(scales, out=out[:2]).data_ptr() == out.data_ptr()
    assert_bitwise(out[:2], packed)
    assert out[2].isnan().all()
    for bad in (out, out[:2].double(), out[:2].to("meta")):
        with pytest.raises(ValueError, match=r"out must be \(2, 2, 16\) torch.float32 on cpu, got"):
            ops.pack_scales(scales, out=bad)
    ops.pack_scales(torch.nn.Parameter(scales), out=out[:2])
    assert not out.requires_grad


def test_packed_scales_have_memory_of_their_own() -> None:
    for shape in ((32, 1), (16, 4), (17, 1)):
        scales = torch.rand(shape)
        packed = ops.pack_scales(scales)
        want = packed.clone()
        scales.zero_()
        assert_bitwise(packed, want)


@pytest.mark.parametrize("shape", [(32,), (48, 3)])
def test_interleave_gate_up(shape: tuple[int, ...]) -> None:
    gate, up = torch.randn(2, *shape)
    out = interleave_gate_up(gate, up)
    assert out.shape == (2 * shape[0], *shape[1:])
    for row in range(shape[0]):
        assert_bitwise(out[row // 16 * 32 + row % 16], gate[row])
        assert_bitwise(out[row // 16 * 32 + 16 + row % 16], up[row])


def test_interleave_errors() -> None:
    with pytest.raises(ValueError, match=r"gate and up must have one shape, got \(16, 2\) and \(16, 3\)"):
        interleave_gate_up(torch.zeros(16, 2), torch.zeros(16, 3))
    with pytest.raises(ValueError, match="multiple of 16 rows, got 17"):
        interleave_gate_up(torch.zeros(17, 2), torch.zeros(17, 2))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(
    "q",
    [
        torch.zeros(16, 48).byte(),
        torch.zeros(16, 0).byte(),
        torch.zeros(16, 64).short(),
        torch.zeros(64).byte(),
        torch.zeros(64, 16).byte().T,
    ],
    ids=["in_features", "empty", "dtype", "1-d", "strided"],
)
def test_pack_errors_name_q(q: torch.Tensor, bits: int) -> None:
    if bits > 4 and q.dtype == torch.uint8:
        q = q.char()
    with pytest.raises((RuntimeError, ValueError), match=r"\bq\b"):
        PACK[bits](q)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "row past the weight": ("rows", {"rows": torch.tensor([0, 17])}),
    "row negative": ("rows", {"rows": torch.tensor([-1])}),
    "rows int32": ("rows", {"rows": torch.tensor([1], dtype=torch.int32)}),
    "rows 2-d": ("rows", {"rows": torch.tensor([[1]])}),
    "dtype": ("dtype", {"dtype": torch.float64}),
    "out_features": ("out_features", {"out_features": 33}),
    "scales": ("scales", {"scales": torch.ones(2, 3, 16)}),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", BAD)
def test_dequantize_errors_name_the_argument(case: str, bits: int) -> None:
    argument, change = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        DEQUANTIZE[bits](**(random_weight(bits, 17, 64).packed | change))
