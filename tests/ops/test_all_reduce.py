"""Sums over ranks: in fp32 in the order of the ranks, the same bits everywhere."""

import pytest
import torch
from support.helpers import DTYPES, assert_bitwise
from support.ranks import in_ranks
from torch import Tensor

from fastinfer import ops
from fastinfer.parallel.group import SLOT_BYTES, Group


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over dimension 0 in fp32, one part after the other, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(0, 7), (1,), (3, 1, 333), (19, 512)])
def test_all_reduce(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    # Of very different sizes, so that another order gives other sums.
    whole = (torch.randn(3, size, *shape) * 10 ** torch.randn(3, size, *shape)).to(dtype)

    def run(group: Group) -> list[Tensor]:
        # Several, as the slots of the memory are used in turns.
        return [ops.all_reduce(x[group.rank], group.memory, group.rank) for x in whole]

    for results in in_ranks(size, run):
        for got, parts in zip(results, whole, strict=True):
            assert_bitwise(got, sum_in_order(parts))


def test_large_sums_are_exchanged_in_parts() -> None:
    # Three ranks do not divide a slot evenly, nor do the elements fill a whole number of slots.
    parts = torch.randn(3, SLOT_BYTES // 4 + 12345)

    def run(group: Group) -> tuple[Tensor, tuple[int, int]]:
        return ops.all_reduce(parts[group.rank], group.memory, group.rank), group.exchanged

    for got, (exchanges, num_bytes) in in_ranks(3, run):
        assert_bitwise(got, sum_in_order(parts))
        assert (exchanges, num_bytes) == (4, 4 * parts.shape[1])


def test_the_result_may_replace_x() -> None:
    parts = torch.randn(2, SLOT_BYTES // 4)

    def run(group: Group) -> Tensor:
        x = parts[group.rank].clone()
        return ops.all_reduce(x, group.memory, group.rank, out=x)

    for got in in_ranks(2, run):
        assert_bitwise(got, sum_in_order(parts))


def test_replayed_graphs_exchange() -> None:
    def run(group: Group) -> list[float]:
        x, graph = torch.zeros(3), ops.CPUGraph()
        with graph.capture():
            out = ops.all_reduce(x, group.memory, group.rank)
        seen = []
        for step in range(4):
            x.fill_(10 * step + group.rank)
            graph.replay()
            seen.append(out[2].item())
        return seen

    assert in_ranks(2, run) == [[1, 21, 41, 61]] * 2


def test_ranks_that_disagree_end() -> None:
    def run(group: Group) -> str:
        x = torch.zeros(6, dtype=[torch.bfloat16, torch.float16][group.rank])
        with pytest.raises(RuntimeError) as raised:
            ops.all_reduce(x, group.memory, group.rank)
        return str(raised.value)

    assert any("exchanges something else than rank" in message for message in in_ranks(2, run))


def test_rank_that_does_not_come() -> None:
    def run(group: Group) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(RuntimeError) as raised:
            ops.all_reduce(torch.zeros(3), group.memory, 0)
        return str(raised.value)

    message, _ = in_ranks(2, run, deadline=0.1)
    assert "rank 1 did not exchange its part within 100 ms" in message


def test_errors() -> None:
    memory, x = Group.create(2).memory, torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"all_reduce: x must be contiguous"):
        ops.all_reduce(x.T, memory, 0)
    with pytest.raises(RuntimeError, match=r"all_reduce: x must be float32, bfloat16 or float16, got int64"):
        ops.all_reduce(x.long(), memory, 0)
    with pytest.raises(RuntimeError, match=r"all_reduce: rank must be in 0\.\.1, got 2"):
        ops.all_reduce(x, memory, 2)
    with pytest.raises(RuntimeError, match=r"all_reduce: group must be the memory of a process group, got 64 bytes"):
        ops.all_reduce(x, torch.zeros(64, dtype=torch.uint8), 0)
