"""Exchanges between ranks: bitwise, for any division, and checked."""

import pytest
import torch
from support.helpers import DTYPES, assert_bitwise
from support.ranks import in_ranks
from torch import Tensor

from fastinfer import ops
from fastinfer.parallel.group import Group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [[7], [1, 16], [33, 2, 64], [5, 1, 1, 9, 300]])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_all_gather(rows: int, widths: list[int], dtype: torch.dtype) -> None:
    whole = torch.randn(3, rows, sum(widths)).to(dtype)

    def run(group: Group) -> list[Tensor]:
        # Several, as the slots of the memory are used in turns.
        parts = (x.split(widths, 1)[group.rank].contiguous() for x in whole)
        return [ops.all_gather(part, group.memory, group.rank, widths) for part in parts]

    for results in in_ranks(len(widths), run):
        for got, expected in zip(results, whole, strict=True):
            assert_bitwise(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_rows_reads_no_rows_of_other_ranks(dtype: torch.dtype) -> None:
    bounds, table = [0, 5, 6, 40], torch.randn(40, 17).to(dtype)
    ids = torch.randint(40, (23,))

    def run(group: Group) -> Tensor:
        start, end = bounds[group.rank : group.rank + 2]
        own = ops.embedding(table[start:end].contiguous(), ops.local_ids(ids, start, end))
        own[(ids < start) | (ids >= end)] = torch.nan
        return ops.all_gather_rows(own, ids, group.memory, group.rank, start, end)

    for got in in_ranks(3, run):
        assert_bitwise(got, table[ids])


def test_more_rows_than_fit_into_a_slot() -> None:
    """Two of these rows do, of 4 MiB."""
    whole, widths, ids = torch.randn(5, 400_000), [300_000, 100_000], torch.tensor([2, 0, 1, 4, 3])

    def run(group: Group) -> list[Tensor]:
        own = whole.split(widths, 1)[group.rank].contiguous()
        start, end = ((0, 2), (2, 5))[group.rank]
        return [
            ops.all_gather(own, group.memory, group.rank, widths),
            ops.all_gather_rows(whole, ids, group.memory, group.rank, start, end),
        ]

    for columns, rows in in_ranks(2, run):
        assert_bitwise(columns, whole)
        assert_bitwise(rows, whole)


def test_local_ids() -> None:
    ids = torch.tensor([-1, 3, 2**40, 9, 8, 4])
    assert ops.local_ids(ids, 3, 9).tolist() == [0, 0, 0, 0, 5, 1]
    assert ops.local_ids(ids[:0], 3, 9).tolist() == []


def test_replayed_graphs_exchange() -> None:
    def run(group: Group) -> list[float]:
        x, graph = torch.zeros(2, 3), ops.CPUGraph()
        with graph.capture():
            out = ops.all_gather(x, group.memory, group.rank, [3, 3])
        seen = []
        for step in range(4):
            x.fill_(10 * step + group.rank)
            graph.replay()
            seen += out[1, ::3].tolist()
        return seen

    assert in_ranks(2, run) == [[0, 1, 10, 11, 20, 21, 30, 31]] * 2


def test_errors() -> None:
    memory, x = Group.create(2).memory, torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"all_gather: widths must have 2 numbers, one for each rank, got 1"):
        ops.all_gather(x, memory, 0, [3])
    with pytest.raises(RuntimeError, match=r"all_gather: x must have the shape \[\*, 4\], got \[2, 3\]"):
        ops.all_gather(x, memory, 0, [4, 3])
    with pytest.raises(RuntimeError, match=r"all_gather: rank must be in 0\.\.1, got 2"):
        ops.all_gather(x, memory, 2, [3, 3])
    with pytest.raises(RuntimeError, match=r"all_gather: group must be the memory of a process group, got 64 bytes"):
        ops.all_gather(x, torch.zeros(64, dtype=torch.uint8), 0, [3, 3])
    with pytest.raises(RuntimeError, match=r"all_gather: a row must have between 1 and 4194304 bytes"):
        ops.all_gather(torch.zeros(1, 2**20), memory, 0, [2**20, 1])
    with pytest.raises(RuntimeError, match=r"all_gather_rows: ids must have the shape \[2\], got \[3\]"):
        ops.all_gather_rows(x, torch.zeros(3).long(), memory, 0, 0, 4)
    with pytest.raises(RuntimeError, match=r"local_ids: start must be less than end, got 4 and 4"):
        ops.local_ids(torch.zeros(3).long(), 4, 4)
