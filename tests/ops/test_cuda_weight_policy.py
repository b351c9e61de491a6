"""Weights are first to leave the L2 where one block alone reads them: copies on the emulator."""

import contextlib
from functools import partial
from pathlib import Path

import pytest
import torch
from support.expert_stack import ExpertStack
from support.helpers import device_fixture
from support.launches import copies_by_policy
from support.linear_formats import FORMATS, Linear

from fastinfer import ops

device = device_fixture("emulated")


@pytest.mark.parametrize("form", [*FORMATS, "w8a8"])
@pytest.mark.parametrize(
    ("tokens", "batch_invariant"), [(1, False), (16, False), (64, False), (128, False), (129, False), (33, True)]
)
def test_a_weight_that_several_tiles_of_tokens_read_stays(
    form: str, tokens: int, batch_invariant: bool, device: str, emulated_library: Path
) -> None:
    x = torch.randn(tokens, 256, device=device).bfloat16()
    if form == "w8a8":
        weight = ops.int8_pack(torch.randint(-127, 128, (160, 256), device=device).to(torch.int8))
        scales, (q, x_scales) = ops.pack_scales(torch.rand(160, 1, device=device)), ops.quantize_int8(x)
        run = partial(ops.w8a8_gemm, q, x_scales, weight, scales, 160)
    else:
        run = partial(Linear(form, 160, 256, torch.bfloat16, device).run, x)
    with ops.batch_invariant() if batch_invariant else contextlib.nullcontext():
        copies = copies_by_policy(emulated_library, run)
    assert_policy(copies, read_once=not batch_invariant and tokens <= 128)


@pytest.mark.parametrize(("tokens", "read_once"), [(4, True), (15, False), (150, False)])
@pytest.mark.parametrize("form", ["dense", "int4"])
def test_a_weight_that_several_tiles_of_an_expert_read_stays(
    form: str, tokens: int, read_once: bool, device: str, emulated_library: Path
) -> None:
    """All rows are of one of two experts: in one tile of 8, in two, or in two of 128."""
    stack = ExpertStack(form, 2, 33, 64, torch.bfloat16, device)
    x = torch.randn(tokens, 64, device=device).bfloat16()
    ids = torch.zeros(tokens, 1, dtype=torch.long, device=device)
    assert_policy(copies_by_policy(emulated_library, lambda: stack.run(x, ids)), read_once)


def assert_policy(copies: dict[str, tuple[int, int]], read_once: bool) -> None:
    if not read_once:
        assert "evict_first" not in copies
        return
    assert copies.keys() == {"evict_first"}
    count, addresses = copies["evict_first"]
    assert count == addresses > 0
