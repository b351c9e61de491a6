"""The weighted sum of a token's rows against fp64."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


def operands(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens * top_k, hidden, device=device).to(dtype)
    weights = torch.rand(tokens, top_k, device=device)
    return x, weights, torch.randn(tokens, hidden, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 577, 4096])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (3, 2), (17, 8)])
def test_combine_experts(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x, weights, residual = operands(tokens, top_k, hidden, dtype, device)
    for added in (None, residual):
        out = ops.combine_experts(x, weights, added)
        assert out.dtype == dtype
        assert_rounded(out, reference.combine_experts(x, weights, added), slack=3e-6)


def test_rows_of_other_experts_are_not_read(device: str) -> None:
    x, weights, residual = operands(17, 4, 577, torch.float32, device)
    ids = torch.randint(0, 8, (17, 4), device=device, dtype=torch.int32)
    own = (ids >= 2) & (ids < 5)
    x[~own.flatten()] = torch.nan
    expected = reference.combine_experts(x.nan_to_num(), weights * own, residual)
    assert_rounded(ops.combine_experts(x, weights, residual, ids, 2, 5), expected, slack=3e-6)
    assert not ops.combine_experts(x, weights, None, ids, 8, 8).any()


def test_unaligned_memory(device: str) -> None:
    x, weights, _ = operands(3, 2, 64, torch.float32, device)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 64)
    assert_bitwise(ops.combine_experts(moved, weights), ops.combine_experts(x, weights))


def test_no_columns(device: str) -> None:
    assert ops.combine_experts(torch.zeros(6, 0, device=device), torch.ones(3, 2, device=device)).shape == (3, 0)


def test_a_token_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    x, weights, residual = operands(33, 4, 96, torch.bfloat16, device)
    one, two = per_thread_count(lambda: ops.combine_experts(x, weights, residual))
    assert_bitwise(one, two)
    parts = zip(x.split(20), weights.split(5), residual.split(5), strict=True)
    assert_bitwise(torch.cat([ops.combine_experts(*part) for part in parts]), one)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(6, 64).int()}),
    "x rows": ("x", {"x": torch.zeros(5, 64)}),
    "x strided": ("x", {"x": torch.zeros(6, 128)[:, :64]}),
    "expert_weights dtype": ("expert_weights", {"expert_weights": torch.zeros(3, 2).half()}),
    "expert_weights strided": ("expert_weights", {"expert_weights": torch.zeros(2, 3).T}),
    "no experts": ("expert_weights", {"expert_weights": torch.zeros(3, 0)}),
    "expert_ids shape": ("expert_ids", {"expert_ids": torch.zeros(2, 3).int()}),
    "expert_ids dtype": ("expert_ids", {"expert_ids": torch.zeros(3, 2)}),
    "expert_ids strided": ("expert_ids", {"expert_ids": torch.zeros(2, 3).int().T}),
    "residual shape": ("residual", {"residual": torch.zeros(6, 64)}),
    "residual dtype": ("residual", {"residual": torch.zeros(3, 64).half()}),
    "residual strided": ("residual", {"residual": torch.zeros(3, 128)[:, :64]}),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, change = BAD[case]
    with pytest.raises(RuntimeError, match=rf"\b({argument})\b"):
        ops.combine_experts(**({"x": torch.zeros(6, 64), "expert_weights": torch.zeros(3, 2)} | change))
