"""Values times the sigmoid of their gates, against fp64."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (2, 7), (19, 111), (3, 3072), (2, 0)])
def test_sigmoid_gate(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, gate = (3 * torch.randn(shape, device=device)).to(dtype), (3 * torch.randn(shape, device=device)).to(dtype)
    out = ops.sigmoid_gate(x, Guarded(gate).view)
    assert out.dtype == dtype
    assert_rounded(out, reference.sigmoid_gate(x, gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "groups", "width"), [(0, 3, 5), (2, 1, 7), (19, 3, 37), (3, 5, 8), (2, 24, 128), (2, 3, 0)]
)
def test_groups(rows: int, groups: int, width: int, dtype: torch.dtype, device: str) -> None:
    """A gate of a group does the same as one of each of its elements, to the last bit."""
    x = (3 * torch.randn(rows, groups * width, device=device)).to(dtype)
    gate = (3 * torch.randn(rows, groups, device=device)).to(dtype)
    out = ops.sigmoid_gate(x, Guarded(gate).view)
    assert out.dtype == dtype
    assert_rounded(out, reference.sigmoid_gate(x, gate))
    assert_bitwise(out, ops.sigmoid_gate(x, gate.repeat_interleave(width, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_range_of_the_gate(dtype: torch.dtype, device: str) -> None:
    """Nothing becomes NaN where exp overflows or underflows. Odd length: the vector loop and its tail both see it."""
    extremes = torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, 88.8, 200.0, 6e4])
    gate = torch.cat([torch.linspace(-30, 30, 601), extremes])[None].to(device, dtype)
    x = torch.full_like(gate, 3)
    out = ops.sigmoid_gate(x, gate)
    assert out.isfinite().all()
    assert_rounded(out[:, :601], reference.sigmoid_gate(x, gate)[:, :601])
    assert_rounded(out[:, 601:], reference.sigmoid_gate(x, gate)[:, 601:])


def test_nan_stays_in_its_element(device: str) -> None:
    x, gate = torch.randn(2, 2, 19, device=device)
    x[0, 5] = gate[1, 18] = torch.nan
    assert ops.sigmoid_gate(x, gate).isnan().nonzero().tolist() == [[0, 5], [1, 18]]


@pytest.mark.parametrize("group_width", [1, 5])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(group_width: int, device: str) -> None:
    x, gate = torch.randn(2, 99, 555, device=device)
    gate = gate[:, : 555 // group_width]
    one, two = per_thread_count(lambda: ops.sigmoid_gate(x, gate))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([ops.sigmoid_gate(*rows) for rows in zip(x.split(1), gate.split(1), strict=True)]), one)


@pytest.mark.parametrize("groups", [55, 5])
def test_in_place(groups: int, device: str) -> None:
    x, gate = torch.randn(9, 55, device=device), torch.randn(9, groups, device=device)
    expected = ops.sigmoid_gate(x, gate)
    assert ops.sigmoid_gate(x, gate, out=x) is x
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


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, x, gate = BAD[case]
    with pytest.raises(RuntimeError, match=rf"^sigmoid_gate: {argument}\b"):
        ops.sigmoid_gate(x, gate)
