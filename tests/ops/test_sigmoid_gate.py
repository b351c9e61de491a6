"""Values times the sigmoid or the softplus of their gates, against fp64."""

from collections.abc import Callable

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

Gate = Callable[[Tensor, Tensor], Tensor]
OPERATORS: dict[str, tuple[Callable[..., Tensor], Gate]] = {
    "sigmoid": (ops.sigmoid_gate, reference.sigmoid_gate),
    "softplus": (ops.softplus_gate, reference.softplus_gate),
}
functions = pytest.mark.parametrize("name", OPERATORS)


@functions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (2, 7), (19, 111), (3, 3072), (2, 0)])
def test_gates(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    operator, expected = OPERATORS[name]
    x, gate = (3 * torch.randn(shape, device=device)).to(dtype), (3 * torch.randn(shape, device=device)).to(dtype)
    out = operator(x, Guarded(gate).view)
    assert out.dtype == dtype
    assert_rounded(out, expected(x, gate))


@functions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "groups", "width"), [(0, 3, 5), (2, 1, 7), (19, 3, 37), (3, 5, 8), (2, 24, 128), (2, 3, 0)]
)
def test_groups(rows: int, groups: int, width: int, dtype: torch.dtype, name: str, device: str) -> None:
    """A gate of a group does the same as one of each of its elements, to the last bit."""
    operator, expected = OPERATORS[name]
    x = (3 * torch.randn(rows, groups * width, device=device)).to(dtype)
    gate = (3 * torch.randn(rows, groups, device=device)).to(dtype)
    out = operator(x, Guarded(gate).view)
    assert out.dtype == dtype
    assert_rounded(out, expected(x, gate))
    assert_bitwise(out, operator(x, gate.repeat_interleave(width, 1)))


@functions
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_range_of_the_gate(dtype: torch.dtype, name: str, device: str) -> None:
    """Nothing becomes NaN where exp overflows or underflows. Odd length: the vector loop and its tail both see it."""
    operator, expected = OPERATORS[name]
    extremes = torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, 88.8, 200.0, 2e4])
    gate = torch.cat([torch.linspace(-30, 30, 601), extremes])[None].to(device, dtype)
    x = torch.full_like(gate, 3)
    out = operator(x, gate)
    assert out.isfinite().all()
    assert_rounded(out[:, :601], expected(x, gate)[:, :601])
    assert_rounded(out[:, 601:], expected(x, gate)[:, 601:])


def test_a_small_softplus_keeps_its_digits(device: str) -> None:
    gate = torch.linspace(-80, 10, 997, device=device)[None]
    x = torch.ones_like(gate)
    expected = reference.softplus_gate(x, gate)
    assert ((ops.softplus_gate(x, gate) - expected) / expected).abs().max() < 6e-7


@functions
def test_nan_stays_in_its_element(name: str, device: str) -> None:
    x, gate = torch.randn(2, 2, 19, device=device)
    x[0, 5] = gate[1, 18] = torch.nan
    assert OPERATORS[name][0](x, gate).isnan().nonzero().tolist() == [[0, 5], [1, 18]]


@functions
@pytest.mark.parametrize("group_width", [1, 5])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(group_width: int, name: str, device: str) -> None:
    operator = OPERATORS[name][0]
    x, gate = torch.randn(2, 99, 555, device=device)
    gate = gate[:, : 555 // group_width]
    one, two = per_thread_count(lambda: operator(x, gate))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([operator(*rows) for rows in zip(x.split(1), gate.split(1), strict=True)]), one)


@functions
@pytest.mark.parametrize("groups", [55, 5])
def test_in_place(groups: int, name: str, device: str) -> None:
    operator = OPERATORS[name][0]
    x, gate = torch.randn(9, 55, device=device), torch.randn(9, groups, device=device)
    expected = operator(x, gate)
    assert operator(x, gate, out=x) is x
    assert_bitwise(x, expected)


X = torch.zeros(2, 8)
BAD: dict[str, tuple[str, Tensor, Tensor]] = {
    "x dtype": ("x", X.int(), X.int()),
    "x strided": ("x", torch.zeros(2, 16)[:, :8], X),
    "x 3-d": ("x", X[None], X[None]),
    "gate rows": ("gate", X, torch.zeros(3, 8)),
    "gate columns do not divide": ("gate", X, torch.zeros(2, 3)),
    "gate columns too many": ("gate", X, torch.zeros(2, 16)),
    "gate without columns": ("gate", X, torch.zeros(2, 0)),
    "gate dtype": ("gate", X, X.half()),
    "gate columns apart": ("gate", X, torch.zeros(2, 16)[:, ::2]),
}


@functions
@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str, name: str) -> None:
    argument, x, gate = BAD[case]
    with pytest.raises(RuntimeError, match=rf"^{name}_gate: {argument}\b"):
        OPERATORS[name][0](x, gate)
