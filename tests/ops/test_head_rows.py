"""Rows of heads: against the obvious order, and as the routing of a grouped product."""

import pytest
import torch
from support.helpers import assert_bitwise, device_fixture

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")


@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (1, 1), (1, 128), (7, 5), (300, 20), (33, 1024)])
def test_order(tokens: int, heads: int, device: str) -> None:
    rows = ops.head_rows(torch.arange(tokens, device=device), heads)
    assert_bitwise(rows.row_ids, torch.arange(tokens * heads, device=device).view(tokens, heads).T.flatten().int())
    assert_bitwise(rows.expert_start, torch.arange(heads + 1, device=device).int() * tokens)


@pytest.mark.parametrize("tokens", [1, 9])
def test_each_head_has_its_matrix(tokens: int, device: str) -> None:
    """Rows may be strided: the first elements of each head."""
    heads, dtype = 5, torch.bfloat16
    x = torch.randn(tokens, heads, 24, device=device).to(dtype)
    weight = torch.randn(heads, 48, 16, device=device).to(dtype)
    rows = ops.head_rows(torch.arange(tokens, device=device), heads)
    out = ops.grouped_gemm(x.view(-1, 24)[:, :16], weight, *rows).view(tokens, heads, 48)
    expected = torch.einsum("thk,hnk->thn", x[..., :16].double(), weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("heads", [0, 1025])
def test_errors(heads: int) -> None:
    with pytest.raises(RuntimeError, match=r"head_rows: heads must be 1 to 1024"):
        ops.head_rows(torch.arange(3), heads)
    with pytest.raises(RuntimeError, match=r"head_rows: positions must be int64"):
        ops.head_rows(torch.arange(3).int(), 2)
