"""Rows as int8 with one scale, alone and behind RMSNorm."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, device_fixture, per_thread_count
from support.quantized_rows import assert_quantized_rows
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

HIDDEN = [1, 7, 111, 576, 4096]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_quantize_int8(rows: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, hidden, device=device).to(dtype)
    assert_quantized_rows(*ops.quantize_int8(x), x.double())


@pytest.mark.parametrize("shape", [(64,), (2, 3, 32), (0, 5, 7), (3, 0)])
def test_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    q, scales = ops.quantize_int8(torch.ones(shape, device=device))
    assert q.shape == shape
    assert q.eq(127).all()
    assert scales.shape == shape[:-1]


def test_rounds_half_to_even(device: str) -> None:
    x = torch.cat([torch.arange(-126.0, 127.0) + 0.5, torch.tensor([127.0, -127.0])]).to(device)
    q, scale = ops.quantize_int8(x)
    assert_bitwise(q, x.round().to(torch.int8))
    assert scale == 1


def test_a_product_is_rounded_before_it_becomes_an_integer() -> None:
    """1.5 times the fp32 next to 1/3 is above 1/2 by less than fp32 shows: with a fused addition it became 1."""
    q, _ = ops.quantize_int8(torch.tensor([[381.0, 1.5, -1.5]]))
    assert q.tolist() == [[127, 0, 0]]


def test_special_rows(device: str) -> None:
    x = torch.randn(7, 40, device=device)
    clean = x.clone()
    x[0] = 0
    x[1] = -0.0
    x[2] *= 1e-38  # the reciprocal of its scale is no finite number
    x[3, 39], x[4, 0], x[5, 7] = torch.nan, torch.inf, -torch.inf
    q, scales = ops.quantize_int8(x)
    assert q[:6].eq(0).all()
    assert scales[:3].eq(0).all()
    assert scales[3:6].isnan().all()
    expected_q, expected_scales = ops.quantize_int8(clean)
    assert_bitwise(q[6], expected_q[6])
    assert_bitwise(scales[6], expected_scales[6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(33, 1000, device=device).to(dtype)
    one, two = per_thread_count(lambda: ops.quantize_int8(x)[0])
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([ops.quantize_int8(row)[0] for row in x.split([1, 2, 30])]), one)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [*HIDDEN, 8192, 16384])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rms_norm_quantize(rows: int, hidden: int, dtype: torch.dtype, with_residual: bool, device: str) -> None:
    x, other = torch.randn(2, rows, hidden, device=device).to(dtype)
    residual = other.clone() if with_residual else None
    weight = (torch.randn(hidden, device=device) + 1).to(dtype)
    before = x.clone()
    q, scales = ops.rms_norm_quantize(x, residual, weight, 1e-5)
    assert_bitwise(x, before)
    if residual is not None:
        assert_bitwise(residual, x + other)
    expected = reference.rms_norm(x if residual is None else residual, weight, 1e-5)
    assert_quantized_rows(q, scales, expected, slack=1e-5)


def test_norm_of_special_rows(device: str) -> None:
    x = torch.randn(3, 100, device=device)
    x[0] = 0
    x[1, 50] = torch.nan
    q, scales = ops.rms_norm_quantize(x, None, torch.ones(100, device=device))
    assert q[:2].eq(0).all()
    assert scales[0] == 0
    assert scales[1].isnan()
    assert scales[2] > 0


X = torch.zeros(2, 8)
BAD: dict[str, tuple[str, Tensor, Tensor | None, Tensor]] = {
    "x dtype": ("x", X.int(), None, torch.ones(8)),
    "x strided": ("x", torch.zeros(2, 16)[:, :8], None, torch.ones(8)),
    "residual shape": ("residual", X, torch.zeros(1, 8), torch.ones(8)),
    "residual dtype": ("residual", X, X.half(), torch.ones(8)),
    "weight length": ("weight", X, None, torch.ones(7)),
}


@pytest.mark.parametrize("case", BAD)
def test_rms_norm_quantize_errors_name_the_argument(case: str) -> None:
    argument, x, residual, weight = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.rms_norm_quantize(x, residual, weight)


@pytest.mark.parametrize("x", [X.int(), torch.zeros(2, 16)[:, :8], torch.tensor(1.0)], ids=["dtype", "strided", "0-d"])
def test_quantize_errors_name_x(x: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\bx\b"):
        ops.quantize_int8(x)
