"""SwiGLU's and GeGLU's elementwise halves, and GELU without a gate, against fp64."""

from collections.abc import Callable

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (ops.silu_and_mul, reference.silu_and_mul),
    "gelu_tanh": (ops.gelu_and_mul, reference.gelu_and_mul),
    "gelu": (lambda x: ops.gelu_and_mul(x, "none"), lambda x: reference.gelu_and_mul(x, "none")),
}

APPROXIMATIONS = ["tanh", "none"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(0, 14), (1, 2), (2, 14), (19, 222), (3, 3072), (2, 3, 34), (18,)])
def test_activation(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> None:
    operator, expected = OPERATORS[name]
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    out = operator(x)
    assert out.dtype == dtype
    assert_rounded(out, expected(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_whole_range_of_the_gate(name: str, dtype: torch.dtype, device: str) -> None:
    """Where exp overflows or underflows, nothing becomes NaN. Odd length: the vector loop and its tail both see it."""
    operator, expected = OPERATORS[name]
    gate = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, 88.8, 200.0, 6e4])])
    x = torch.stack([gate, torch.ones_like(gate)]).flatten().to(device, dtype)
    out = operator(x)
    assert out.isfinite().all()
    assert_rounded(out[:601], expected(x)[:601])
    assert_rounded(out[601:], expected(x)[601:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (2, 7), (19, 111), (3, 3072), (2, 3, 34), (9,), (2, 0)])
def test_gelu(shape: tuple[int, ...], approximate: str, dtype: torch.dtype, device: str) -> None:
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    before = x.clone()
    out = ops.gelu(x, approximate)
    assert out.dtype == dtype
    assert_rounded(out, reference.gelu(x, approximate))
    assert_bitwise(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gelu_is_the_gated_one_with_a_gate_of_ones(approximate: str, dtype: torch.dtype, device: str) -> None:
    """Also where exp overflows or underflows, and for NaN, which stays in its element."""
    extremes = torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, torch.nan, 88.8, 200.0, 6e4])
    x = torch.cat([extremes, torch.linspace(-30, 30, 601), extremes]).to(device, dtype)
    out = ops.gelu(x, approximate)
    assert_bitwise(out, ops.gelu_and_mul(torch.cat([x, torch.ones_like(x)]), approximate))
    assert_bitwise(out.isnan(), x.isnan())


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_stays_in_its_element(name: str, device: str) -> None:
    x = torch.randn(2, 38, device=device)
    x[0, 5] = x[1, 18 + 19] = torch.nan
    assert OPERATORS[name][0](x).isnan().nonzero().tolist() == [[0, 5], [1, 18]]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(name: str, device: str) -> None:
    operator = OPERATORS[name][0]
    x = torch.randn(99, 1110, device=device)
    one, two = per_thread_count(lambda: operator(x))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([operator(row) for row in x.split(1)]), one)


@pytest.mark.parametrize("operator", [ops.silu_and_mul, ops.gelu_and_mul])
@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 7), torch.zeros(2, 8).int(), torch.zeros(2, 16)[:, :8], torch.tensor(1.0)],
    ids=["odd", "dtype", "strided", "scalar"],
)
def test_errors_name_x(operator: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\bx\b"):
        operator(x)


@pytest.mark.parametrize("x", [torch.zeros(2, 8).int(), torch.zeros(2, 16)[:, :8]], ids=["dtype", "strided"])
def test_gelu_errors_name_x(x: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"^gelu: x\b"):
        ops.gelu(x)


@pytest.mark.parametrize("operator", [ops.gelu_and_mul, ops.gelu])
def test_unknown_approximation_is_refused(operator: Callable[[Tensor, str], Tensor]) -> None:
    with pytest.raises((RuntimeError, ValueError), match="approximate"):
        operator(torch.zeros(2, 8), "fast")
