"""LoRA of mixed batches: each token with the matrices of its own adapter, against fp64."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import (
    DTYPES,
    Guarded,
    assert_bitwise,
    assert_rounded,
    device_fixture,
    num_threads,
    per_thread_count,
)
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

SLOTS = 4  # the last one is never used


def adapters(rank: int, features: int, out: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Three adapters of different ranks; NaN in the slot and the rows that nobody uses."""
    ranks = torch.tensor([rank, max(rank - 3, 1), (rank + 1) // 2, rank], dtype=torch.int32)
    a, b = torch.randn(SLOTS, rank, features), torch.randn(SLOTS, rank, out)
    for slot, used in enumerate(ranks.tolist()):
        a[slot, used:], b[slot, used:] = torch.nan, torch.nan
    a[-1], b[-1] = torch.nan, torch.nan
    return {
        "a": (a / features**0.5).to(dtype).to(device),
        "b": (b / rank**0.5).to(dtype).to(device),
        "ranks": ranks.to(device),
    }


def some_ids(tokens: int, device: str) -> Tensor:
    """Any of the three adapters or none, then a run of one adapter."""
    ids = torch.randint(-1, SLOTS - 1, (tokens,), dtype=torch.int32)
    ids[tokens // 2 :] = 1
    ids[:1] = 2
    return ids.to(device)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 8), (1, 64), (7, 1), (19, 5), (67, 16)])
def test_add_lora(
    tokens: int, rank: int, norm: bool, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> None:
    for features, out in ((96, 192), (577, 145), (1, 1), (16, 2085)):
        x = torch.randn(tokens, features, device=device).to(dtype)
        y = torch.randn(tokens, out, device=device).to(dtype)
        matrices, ids = adapters(rank, features, out, weight_dtype, device), some_ids(tokens, device)
        options: dict[str, Any] = {}
        if norm:
            norm_weight = torch.randn(features, device=device)
            options = {"norm_weight": norm_weight if rank > 5 else norm_weight.to(dtype), "eps": 1e-5}
        expected = reference.add_lora(y, x, adapter_ids=ids, **matrices, **options)
        guarded = Guarded(y)
        ops.add_lora(guarded.view, x, adapter_ids=ids, **matrices, **options)
        guarded.assert_intact()
        assert_rounded(guarded.view, expected, slack=1e-5)
        assert_bitwise(guarded.view[ids < 0], y[ids < 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [16, 48])
def test_runs(run: int, dtype: torch.dtype, device: str) -> None:
    """Gate and up of an interleaved product, each with an adapter of its own."""
    tokens, runs, features = 9, 5, 64
    x = torch.randn(tokens, features, device=device).to(dtype)
    y = torch.randn(tokens, runs, 2, run, device=device).to(dtype)
    out, ids = y.clone(), some_ids(tokens, device)
    for part in (0, 1):
        matrices = adapters(8, features, runs * run, dtype, device)
        expected = reference.add_lora(y[:, :, part].flatten(1), x, adapter_ids=ids, **matrices)
        ops.add_lora(out[:, :, part], x, adapter_ids=ids, **matrices)
        assert_rounded(out[:, :, part].flatten(1), expected, slack=1e-5)
        if part == 0:
            assert_bitwise(out[:, :, 1], y[:, :, 1])


def test_strided_x(device: str) -> None:
    memory = torch.full((9, 160), torch.nan, device=device)
    x = memory[:, 32:96]
    x.copy_(torch.randn(9, 64))
    matrices, ids = adapters(8, 64, 32, torch.float32, device), some_ids(9, device)
    got, expected = torch.zeros(2, 9, 32, device=device)
    ops.add_lora(got, x, adapter_ids=ids, **matrices)
    ops.add_lora(expected, x.contiguous(), adapter_ids=ids, **matrices)
    assert_bitwise(got, expected)


def test_without_ranks_all_rows_count(device: str) -> None:
    x, ids = torch.randn(5, 64, device=device), torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32, device=device)
    matrices = adapters(8, 64, 32, torch.float32, device)
    matrices["a"].nan_to_num_(0.5), matrices["b"].nan_to_num_(0.5)
    matrices["ranks"].fill_(8)
    got, expected = torch.zeros(2, 5, 32, device=device)
    ops.add_lora(got, x, matrices["a"], matrices["b"], ids)
    ops.add_lora(expected, x, adapter_ids=ids, **matrices)
    assert_bitwise(got, expected)
    assert got[0].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own_inputs", [False, True])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (7, 3), (41, 2)])
def test_experts(tokens: int, top_k: int, own_inputs: bool, dtype: torch.dtype, device: str) -> None:
    """The rows of a token have matrices, and ranks, of the token's adapter and their own experts."""
    experts, features, runs = 5, 72, 3
    rows = tokens * top_k
    x = torch.randn(rows if own_inputs else tokens, features, device=device).to(dtype)
    each = [adapters(7, features, runs * 16, dtype, device) for _ in range(experts)]
    matrices = {name: torch.stack([one[name] for one in each], 1).contiguous() for name in each[0]}
    matrices["ranks"][1, 2] = 0
    options = {"adapter_ids": some_ids(tokens, device), **matrices}
    options["expert_ids"] = torch.rand(tokens, experts).argsort(-1)[:, :top_k].int().contiguous().to(device)
    y = torch.randn(rows, runs, 2, 16, device=device).to(dtype)
    out = y.clone()
    ops.add_lora(out[:, :, 1], x, **options)
    expected = reference.add_lora(y[:, :, 1].flatten(1), x, **options)
    assert_rounded(out[:, :, 1].flatten(1), expected, slack=1e-5)
    assert_bitwise(out[:, :, 0], y[:, :, 0])
    token = tokens // 2
    own = slice(token * top_k, (token + 1) * top_k)
    alone = y[own].clone()
    few = {name: options[name][token : token + 1] for name in ("adapter_ids", "expert_ids")}
    ops.add_lora(alone[:, :, 1], x[own] if own_inputs else x[token : token + 1], **(options | few))
    assert_bitwise(alone, out[own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own_inputs", [False, True])
def test_the_same_experts_of_all_tokens(own_inputs: bool, dtype: torch.dtype, device: str) -> None:
    """One row of ids stands for a row for each token, as heads with matrices of their own have it."""
    tokens, heads, features, out = 23, 5, 40, 56
    x = torch.randn(tokens * heads if own_inputs else tokens, features, device=device).to(dtype)
    each = [adapters(7, features, out, dtype, device) for _ in range(heads)]
    matrices = {name: torch.stack([one[name] for one in each], 1).contiguous() for name in each[0]}
    ids = some_ids(tokens, device)
    head_ids = torch.tensor([[4, 0, 1, 3, 2]], dtype=torch.int32, device=device)
    got, expected = torch.zeros(2, tokens * heads, out, device=device, dtype=dtype)
    ops.add_lora(got, x, adapter_ids=ids, expert_ids=head_ids, **matrices)
    ops.add_lora(expected, x, adapter_ids=ids, expert_ids=head_ids.expand(tokens, -1).contiguous(), **matrices)
    assert_bitwise(got, expected)
    assert got.view(tokens, heads, out)[ids >= 0].abs().amax(-1).gt(0).all()


@pytest.mark.parametrize("ids", [[-1, -1, -1], [1, -1, 1]])
def test_rows_without_an_adapter_keep_every_bit(ids: list[int], device: str) -> None:
    """Negative zero and NaN too; an adapter of rank 0 is none."""
    y = torch.tensor([[-0.0, torch.nan, 1.0]], device=device).repeat(3, 1)
    a, b = torch.full((2, 4, 8), torch.nan, device=device), torch.full((2, 4, 3), torch.nan, device=device)
    ranks = torch.tensor([4, 0], dtype=torch.int32, device=device)
    out = y.clone()
    adapter_ids = torch.tensor(ids, dtype=torch.int32, device=device)
    ops.add_lora(out, torch.randn(3, 8, device=device), a, b, adapter_ids, ranks=ranks)
    assert_bitwise(out.view(torch.int32), y.view(torch.int32))


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_the_same_in_any_batch(dtype: torch.dtype, device: str) -> None:
    tokens, features, out = 61, 200, 340
    x, y = torch.randn(tokens, features, device=device).to(dtype), torch.randn(tokens, out, device=device).to(dtype)
    matrices, ids = adapters(7, features, out, dtype, device), some_ids(tokens, device)
    options = {**matrices, "norm_weight": torch.randn(features, device=device)}
    together = y.clone()
    ops.add_lora(together, x, adapter_ids=ids, **options)
    for piece in (*torch.arange(tokens)[:, None], torch.randperm(tokens), torch.arange(5, 40)):
        piece = piece.to(device)
        alone = y[piece]
        ops.add_lora(alone, x[piece], adapter_ids=ids[piece], **options)
        assert_bitwise(alone, together[piece])


@pytest.mark.parametrize("tokens", [1, 33])
def test_threads(tokens: int, device: str) -> None:
    x, matrices = torch.randn(tokens, 520, device=device), adapters(16, 520, 1000, torch.bfloat16, device)
    ids = some_ids(tokens, device)

    def run() -> Tensor:
        y = torch.ones(tokens, 1000, device=device)
        ops.add_lora(y, x, adapter_ids=ids, **matrices)
        return y

    assert_bitwise(*per_thread_count(run))
    with num_threads(3):
        assert_bitwise(run(), per_thread_count(run)[0])


@pytest.mark.parametrize("sizes", [(0, 8, 4, 8), (3, 8, 0, 8), (3, 8, 4, 0), (3, 0, 4, 8)], ids=str)
def test_nothing_to_do(sizes: tuple[int, int, int, int], device: str) -> None:
    tokens, features, rank, out = sizes
    y = torch.ones(tokens, out, device=device)
    a, b = torch.ones(2, rank, features, device=device), torch.ones(2, rank, out, device=device)
    ids = torch.zeros(tokens, dtype=torch.int32, device=device)
    ops.add_lora(y, torch.ones(tokens, features, device=device), a, b, ids)
    assert y.eq(1).all()


@pytest.mark.parametrize(
    ("name", "value"), [("adapter_ids", SLOTS), ("adapter_ids", 2**31 - 1), ("ranks", 9), ("ranks", -1)]
)
def test_values_out_of_range(name: str, value: int, device: str, request: pytest.FixtureRequest) -> None:
    """The CPU names them. A GPU reads nothing there: such an adapter is none, such a rank the nearest."""
    x, y = torch.randn(3, 64, device=device), torch.randn(3, 32, device=device)
    matrices = adapters(8, 64, 32, torch.float32, device)
    matrices["a"].nan_to_num_(0.5), matrices["b"].nan_to_num_(0.5)
    ids = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    (ids if name == "adapter_ids" else matrices["ranks"])[1] = value
    out = y.clone()
    if request.node.callspec.params["device"] in ("cpu", "avx512"):
        with pytest.raises(RuntimeError, match=rf"\b{name}\[1\]"):
            ops.add_lora(out, x, adapter_ids=ids, **matrices)
        return
    ops.add_lora(out, x, adapter_ids=ids, **matrices)
    if name == "adapter_ids":
        ids[1] = -1
    matrices["ranks"].clamp_(0, 8)
    assert_rounded(out, reference.add_lora(y, x, adapter_ids=ids, **matrices), slack=1e-5)


def test_a_replay_checks_its_adapters() -> None:
    x, y, ids = torch.randn(2, 8), torch.zeros(2, 8), torch.tensor([0, -1], dtype=torch.int32)
    a, b = torch.randn(2, 2, 4, 8)
    graph = ops.CPUGraph()
    with graph.capture():
        ops.add_lora(y, x, a, b, ids)
    ids.copy_(torch.tensor([1, 1]))
    y.zero_()
    graph.replay()
    expected = torch.zeros(2, 8)
    ops.add_lora(expected, x, a, b, ids)
    assert_bitwise(y, expected)
    ids[1] = 2
    with pytest.raises(RuntimeError, match=r"adapter_ids\[1\]"):
        graph.replay()


GOOD: dict[str, Any] = {
    "y": torch.zeros(3, 32),
    "x": torch.zeros(3, 8),
    "a": torch.zeros(2, 4, 8),
    "b": torch.zeros(2, 4, 32),
    "adapter_ids": torch.zeros(3, dtype=torch.int32),
    "ranks": torch.zeros(2, dtype=torch.int32),
    "norm_weight": torch.ones(8),
}
BAD: dict[str, tuple[str, Tensor]] = {
    "y dtype": ("y", GOOD["y"].half()),
    "y tokens": ("y", torch.zeros(2, 32)),
    "y 1-d": ("y", torch.zeros(32)),
    "y overlaps": ("y", torch.zeros(1, 32).expand(3, 32)),
    "y columns apart": ("y", torch.zeros(3, 64)[:, ::2]),
    "y short runs": ("y", torch.zeros(3, 4, 8)),
    "y runs overlap": ("y", torch.zeros(3, 1, 16).expand(3, 2, 16)),
    "x dtype": ("x", GOOD["x"].int()),
    "x 3-d": ("x", torch.zeros(3, 2, 4)),
    "x columns apart": ("x", torch.zeros(3, 16)[:, ::2]),
    "a features": ("a", torch.zeros(2, 4, 9)),
    "a dtype": ("a", GOOD["a"].int()),
    "a strided": ("a", torch.zeros(2, 4, 16)[..., :8]),
    "b rank": ("b", torch.zeros(2, 5, 32)),
    "b out": ("b", torch.zeros(2, 4, 31)),
    "b slots": ("b", torch.zeros(3, 4, 32)),
    "b dtype": ("b", GOOD["b"].half()),
    "b strided": ("b", torch.zeros(2, 32, 4).mT),
    "adapter_ids dtype": ("adapter_ids", GOOD["adapter_ids"].long()),
    "adapter_ids length": ("adapter_ids", GOOD["adapter_ids"][:2]),
    "ranks dtype": ("ranks", GOOD["ranks"].long()),
    "ranks length": ("ranks", GOOD["ranks"][:1]),
    "norm_weight length": ("norm_weight", torch.ones(7)),
    "norm_weight dtype": ("norm_weight", torch.ones(8).half()),
}


GOOD_EXPERTS: dict[str, Any] = GOOD | {
    "y": torch.zeros(6, 32),
    "a": torch.zeros(2, 5, 4, 8),
    "b": torch.zeros(2, 5, 4, 32),
    "expert_ids": torch.zeros(3, 2, dtype=torch.int32),
    "ranks": torch.zeros(2, 5, dtype=torch.int32),
}
BAD_EXPERTS: dict[str, tuple[str, Tensor]] = {
    "y rows": ("y", torch.zeros(3, 32)),
    "x rows": ("x", torch.zeros(2, 8)),
    "no experts": ("a", GOOD["a"]),
    "b experts": ("b", torch.zeros(2, 4, 4, 32)),
    "expert_ids dtype": ("expert_ids", torch.zeros(3, 2, dtype=torch.int64)),
    "expert_ids tokens": ("expert_ids", torch.zeros(2, 2, dtype=torch.int32)),
    "expert_ids strided": ("expert_ids", torch.zeros(2, 3, dtype=torch.int32).T),
    "expert_ids value": ("expert_ids", torch.full((3, 2), 5, dtype=torch.int32)),
    "expert_ids negative": ("expert_ids", torch.full((3, 2), -1, dtype=torch.int32)),
    "ranks experts": ("ranks", GOOD["ranks"]),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_errors_of_experts_name_the_argument(case: str) -> None:
    argument, bad = BAD_EXPERTS[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.add_lora(**(GOOD_EXPERTS | {argument: bad}))
    ops.add_lora(**GOOD_EXPERTS)


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, bad = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.add_lora(**(GOOD | {argument: bad}))
