"""Merging partial attentions: accuracy against fp64, empty parts, associativity, errors."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")


def random_state(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, device=device).to(dtype), 4 * torch.randn(shape[:2], device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3, 64), (1, 1, 1), (5, 3, 64), (7, 9, 13), (3, 4, 80), (2, 2, 257)])
def test_merge_attention_states(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    a, b = random_state(shape, dtype, device), random_state(shape, dtype, device)
    out, lse = ops.merge_attention_states(*a, *b)
    expected, expected_lse = reference.merge_attention_states(*a, *b)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_rounded(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_on_the_cpu(dtype: torch.dtype) -> None:
    a, b = random_state((5, 3, 80), dtype, "cpu"), random_state((5, 3, 80), dtype, "cpu")
    expected = ops.merge_attention_states(*a, *b)
    found = ops.merge_attention_states(*a, *b, inplace=True)
    assert found[0] is a[0]
    assert found[1] is a[1]
    assert_bitwise(a[0], expected[0])
    assert_bitwise(a[1], expected[1])


@pytest.mark.emulated
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_in_place_on_a_gpu(device: str) -> None:
    a, b = random_state((5, 3, 64), torch.float16, device), random_state((5, 3, 64), torch.float16, device)
    with pytest.raises(RuntimeError, match="a must be on the CPU for inplace"):
        ops.merge_attention_states(*a, *b, inplace=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_saw_nothing_are_not_used(dtype: torch.dtype, device: str) -> None:
    """Whatever they hold; where both saw nothing, the result is 0."""
    (a, a_lse), (b, b_lse) = (random_state((4, 3, 64), dtype, device) for _ in range(2))
    a_lse[:2], b_lse[1:3] = -torch.inf, -torch.inf
    a[:2], b[1:3] = torch.nan, torch.inf
    out, lse = ops.merge_attention_states(a, a_lse, b, b_lse)
    assert_bitwise(out[0], b[0])
    assert_bitwise(lse[0], b_lse[0])
    assert out[1].eq(0).all()
    assert lse[1].isneginf().all()
    assert_bitwise(out[2], a[2])
    assert_bitwise(lse[2], a_lse[2])
    assert out[3].isfinite().all()


def test_nan_in_an_lse_shows(device: str) -> None:
    (a, a_lse), (b, b_lse) = (random_state((4, 1, 8), torch.float32, device) for _ in range(2))
    a_lse[:2], b_lse[2:] = torch.nan, torch.nan
    b_lse[0], a_lse[3] = -torch.inf, -torch.inf
    out, lse = ops.merge_attention_states(a, a_lse, b, b_lse)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_large_lse_does_not_overflow(device: str) -> None:
    (a, a_lse), (b, b_lse) = (random_state((5, 3, 64), torch.float32, device) for _ in range(2))
    expected, expected_lse = ops.merge_attention_states(a, a_lse, b, b_lse)
    for shift in (1000.0, -1000.0):
        out, lse = ops.merge_attention_states(a, a_lse + shift, b, b_lse + shift)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse, expected_lse + shift, rtol=1e-6, atol=1e-3)


def test_merging_is_associative_and_equals_attention_over_all_positions(device: str) -> None:
    """Against softmax over the union of three sets of positions."""
    logits, values = torch.randn(6, 4, 30, device=device), torch.randn(6, 30, 4, 16, device=device)
    parts = []
    for positions in (slice(0, 7), slice(7, 8), slice(8, 30)):
        part = logits[..., positions]
        out = torch.einsum("thk,tkhd->thd", part.softmax(-1), values[:, positions])
        parts.append((out.contiguous(), part.logsumexp(-1)))
    left = ops.merge_attention_states(*ops.merge_attention_states(*parts[0], *parts[1]), *parts[2])
    right = ops.merge_attention_states(*parts[0], *ops.merge_attention_states(*parts[1], *parts[2]))
    expected = torch.einsum("thk,tkhd->thd", logits.softmax(-1), values), logits.logsumexp(-1)
    for merged in (left, right):
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def test_threads() -> None:
    a, b = random_state((99, 3, 64), torch.float32, "cpu"), random_state((99, 3, 64), torch.float32, "cpu")
    assert_bitwise(*per_thread_count(lambda: ops.merge_attention_states(*a, *b)[0]))


GOOD: dict[str, Any] = {
    "a": torch.zeros(3, 2, 8),
    "a_lse": torch.zeros(3, 2),
    "b": torch.zeros(3, 2, 8),
    "b_lse": torch.zeros(3, 2),
}
BAD: dict[str, tuple[str, Tensor]] = {
    "a dtype": ("a", torch.zeros(3, 2, 8).int()),
    "a 2-d": ("a", torch.zeros(3, 16)),
    "a strided": ("a", torch.zeros(3, 8, 2).transpose(1, 2)),
    "b shape": ("b", torch.zeros(3, 2, 9)),
    "b dtype": ("b", torch.zeros(3, 2, 8).half()),
    "b strided": ("b", torch.zeros(3, 8, 2).transpose(1, 2)),
    "a_lse shape": ("a_lse", torch.zeros(2, 3)),
    "a_lse dtype": ("a_lse", torch.zeros(3, 2).double()),
    "b_lse shape": ("b_lse", torch.zeros(3)),
    "b_lse strided": ("b_lse", torch.zeros(2, 3).t()),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, value = BAD[case]
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.merge_attention_states(**(GOOD | {argument: value}))
