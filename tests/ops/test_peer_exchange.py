"""Exchanges between GPUs: the bits of the CPU's operators, whoever is ahead, and an end to every wait."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from support.helpers import assert_bitwise, device_fixture
from support.peers import Peers, run_together
from torch import Tensor

from fastinfer import _C, ops
from fastinfer.ops.launches import no_dependent_launches
from fastinfer.parallel.group import Group
from fastinfer.parallel.peer_group import PeerGroup

device = device_fixture("cuda", "emulated")
MakePeers = Callable[..., Peers]


@pytest.fixture
def make_peers(device: str, request: pytest.FixtureRequest) -> MakePeers:
    library = None if device.startswith("cuda") else request.getfixturevalue("emulated_library")
    return lambda size, **options: Peers(size, device, library, **options)


def sum_in_order(parts: Tensor) -> Tensor:
    """The sum over dimension 0 in fp32, one part after the other, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def spread(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Numbers of very different sizes, so that another order gives other sums."""
    return (torch.randn(*shape, device=device) * 10 ** torch.randn(*shape, device=device)).to(dtype)


# Of a slot of 16 KiB: single elements, vectors, several blocks, and more than a slot.
@pytest.mark.parametrize(
    ("size", "elements", "dtype"),
    [
        (1, 7, torch.float32),
        (2, 333, torch.bfloat16),
        (3, 4096, torch.float16),
        (5, 64, torch.float32),
        (3, 3000, torch.float32),
        (2, 20000, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("in_host", [False, True])
def test_all_reduce(
    size: int, elements: int, dtype: torch.dtype, in_host: bool, device: str, make_peers: MakePeers
) -> None:
    peers = make_peers(size, in_host=in_host)
    # Three exchanges, as the slots are used in turns, with other numbers of blocks.
    whole = [spread(size, n, dtype=dtype, device=device) for n in (elements, 24, elements)]
    own = [[parts[rank].clone() for parts in whole] for rank in range(size)]

    def run(group: PeerGroup) -> list[Tensor]:
        return [ops.all_reduce(x, group.memory, group.rank) for x in own[group.rank]]

    for slow in (-1, 0, size - 1):
        for results in peers.run(run, slow):
            for got, parts in zip(results, whole, strict=True):
                assert_bitwise(got, sum_in_order(parts))
    for group in peers.groups:
        group.check()


@pytest.mark.parametrize(("size", "elements"), [(3, 2600), (5, 4 * 133), (4, 77)])
def test_two_shots_give_the_bits_of_one(size: int, elements: int, device: str, make_peers: MakePeers) -> None:
    """In place; ranks have shares of different sizes, or none at all."""
    peers = make_peers(size, one_shot_bytes=16)
    for slow in (-1, 0, size - 1):
        # The second sum takes one shot, the last one has another number of blocks than the first.
        whole = [spread(size, n, dtype=torch.float32, device=device) for n in (elements, 3, 100)]
        own = [[parts[rank].clone() for parts in whole] for rank in range(size)]

        def run(group: PeerGroup, own: list[list[Tensor]] = own) -> None:
            for x in own[group.rank]:
                ops.all_reduce(x, group.memory, group.rank, out=x)

        peers.run(run, slow)
        for results in own:
            for got, parts in zip(results, whole, strict=True):
                assert_bitwise(got, sum_in_order(parts))


@pytest.mark.parametrize("widths", [[7], [1, 16], [32, 64, 8], [6, 2, 4, 300]])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_all_gather(rows: int, widths: list[int], device: str, make_peers: MakePeers) -> None:
    peers = make_peers(len(widths), slot_bytes=2**12)  # so that many rows are exchanged in parts
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(2, rows, sum(widths), device=device).to(dtype)
        parts = [x.split(widths, 1) for x in whole]
        own = [[x[rank].clone(memory_format=torch.contiguous_format) for x in parts] for rank in range(len(widths))]

        def run(group: PeerGroup, own: list[list[Tensor]] = own) -> list[Tensor]:
            return [ops.all_gather(x, group.memory, group.rank, widths) for x in own[group.rank]]

        for results in peers.run(run, slow=len(widths) - 1):
            for got, expected in zip(results, whole, strict=True):
                assert_bitwise(got, expected)


# Of a slot of 4 KiB: units of 16, 4 and 2 bytes; a rank without a row; more rows than fit into a slot.
@pytest.mark.parametrize(
    ("bounds", "rows", "columns", "dtype"),
    [
        ([0, 40], 0, 8, torch.float32),
        ([0, 40], 3, 7, torch.bfloat16),
        ([0, 1, 40], 1, 64, torch.bfloat16),
        ([0, 19, 21, 40], 23, 33, torch.float32),
        ([0, 13, 26, 40], 50, 96, torch.float16),
        (list(range(0, 45, 5)), 37, 48, torch.bfloat16),
    ],
)
def test_all_gather_rows(
    bounds: list[int], rows: int, columns: int, dtype: torch.dtype, device: str, make_peers: MakePeers
) -> None:
    """Rows of other ranks are not read; the embedding of a model looks up ``local_ids``."""
    peers = make_peers(len(bounds) - 1, slot_bytes=2**12)
    table = torch.randn(40, columns, device=device).to(dtype)
    # Two exchanges with the same slot, and one in between with other numbers of blocks.
    steps = [torch.randint(40, (n,), device=device) for n in (rows, 1, rows)]
    own: dict[int, list[Tensor]] = {}
    for rank, (start, end) in enumerate(pairwise(bounds)):
        part = table[start:end].clone()
        own[rank] = [part[ops.local_ids(ids, start, end)] for ids in steps]
        for x, ids in zip(own[rank], steps, strict=True):
            x[(ids < start) | (ids >= end)] = torch.nan

    def run(group: PeerGroup) -> list[Tensor]:
        start, end = bounds[group.rank : group.rank + 2]
        pairs = zip(own[group.rank], steps, strict=True)
        return [ops.all_gather_rows(x, ids, group.memory, group.rank, start, end) for x, ids in pairs]

    for slow in (-1, 0, len(bounds) - 2):
        for results in peers.run(run, slow):
            for got, ids in zip(results, steps, strict=True):
                assert_bitwise(got, table[ids])
    for group in peers.groups:
        group.check()


def test_local_ids(device: str) -> None:
    ids = torch.tensor([-1, 3, 2**40, 9, 8, 4, *range(400)], device=device)
    expected = torch.where((ids >= 3) & (ids < 9), ids - 3, 0)
    assert torch.equal(ops.local_ids(ids, 3, 9), expected)
    assert ops.local_ids(ids[:0], 3, 9).shape == (0,)


@pytest.mark.parametrize(
    ("size", "rows", "hidden", "dtype"),
    [
        (2, 1, 576, torch.bfloat16),
        (3, 5, 40, torch.float16),
        (2, 3, 7, torch.float32),
        (2, 2, 4104, torch.float32),
        (2, 1, 18000, torch.bfloat16),
        (1, 70, 16, torch.float32),
        (4, 0, 8, torch.float32),
    ],
)
def test_all_reduce_add_rms_norm(
    size: int, rows: int, hidden: int, dtype: torch.dtype, device: str, make_peers: MakePeers
) -> None:
    peers = make_peers(size, slot_bytes=2**17)
    parts = [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(size)]
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype if rows % 2 else torch.float32)
    expected_residual = residual.clone()
    expected = ops.add_rms_norm(sum_in_order(torch.stack(parts)), expected_residual, weight, 1e-5)
    residuals = [residual.clone() for _ in range(size)]

    def run(group: PeerGroup) -> Tensor:
        rank = group.rank
        return ops.all_reduce_add_rms_norm(parts[rank], residuals[rank], weight, 1e-5, group.memory, rank)

    for got, changed in zip(peers.run(run, slow=0), residuals, strict=True):
        assert_bitwise(got, expected)
        assert_bitwise(changed, expected_residual)


def test_many_rows_are_summed_before_the_norm(device: str, make_peers: MakePeers) -> None:
    """They do not fit into a slot."""
    peers = make_peers(2, slot_bytes=2**12)
    x, residual = torch.randn(2, 50, 64, device=device), torch.randn(50, 64, device=device)
    weight, residuals = torch.randn(64, device=device), [residual.clone() for _ in range(2)]
    expected = ops.add_rms_norm(sum_in_order(x), residual, weight, 1e-5)

    def run(group: PeerGroup) -> Tensor:
        rank = group.rank
        return ops.all_reduce_add_rms_norm(x[rank], residuals[rank], weight, 1e-5, group.memory, rank)

    for got in peers.run(run):
        assert_bitwise(got, expected)


def test_two_groups_exchange_at_the_same_time(device: str, make_peers: MakePeers) -> None:
    """Those of a step's halves, with sums of different sizes, whichever of all streams is behind."""
    size = 2  # few blocks at once: ThreadSanitizer keeps memory of each of their threads
    lanes = [make_peers(size, slot_bytes=2**12, one_shot_bytes=2**11) for _ in range(2)]
    lane_of = {id(group): lane for lane, peers in enumerate(lanes) for group in peers.groups}
    weight = torch.randn(64, device=device)
    for slow in (-1, *range(size)):
        # More than a slot, several blocks, and single ones; the last sum of each group is followed by a norm.
        parts = [[torch.randn(size, rows, 64, device=device) for rows in counts] for counts in ([3, 40, 9], [21, 1, 5])]
        own = [[x.clone() for x in some] for some in parts]
        residuals = [torch.zeros_like(some[-1]) for some in parts]

        def run(
            group: PeerGroup, own: list[list[Tensor]] = own, residuals: list[Tensor] = residuals
        ) -> tuple[Tensor, ...]:
            lane, rank, memory = lane_of[id(group)], group.rank, group.memory
            *sums, last = [x[rank] for x in own[lane]]
            for x in sums:
                ops.all_reduce(x, memory, rank, out=x)
            return *sums, ops.all_reduce_add_rms_norm(last, residuals[lane][rank], weight, 1e-5, memory, rank)

        with no_dependent_launches():
            found = run_together(lanes, run, slow)
        for results, some in zip(found, parts, strict=True):
            *expected, total = map(sum_in_order, some)
            expected.append(ops.rms_norm(total, weight, 1e-5))
            for of_rank in results:
                for got, want in zip(of_rank, expected, strict=True):
                    assert_bitwise(got, want)
    for peers in lanes:
        for group in peers.groups:
            group.check()


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_rows"])
def test_rank_that_does_not_come(op: str, device: str, make_peers: MakePeers) -> None:
    peers = make_peers(2, deadline=1e-2)
    x, ids = torch.ones(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    arguments = {"all_reduce": (x,), "all_gather_rows": (x, ids)}[op]
    # Rank 1 has the row: rank 0 writes nothing into memory that it does not share with rank 1 any more.
    ranges = [(), ()] if op == "all_reduce" else [(1, 2), (0, 1)]

    def run(group: PeerGroup) -> list[Tensor]:
        # After the deadline the third wait ends soon.
        count, exchange = 3 if group.rank == 0 else 1, getattr(ops, op)
        return [exchange(*arguments, group.memory, group.rank, *ranges[group.rank]) for _ in range(count)]

    peers.run(run)
    peers.groups[1].check()
    with pytest.raises(RuntimeError, match=r"aborted: another rank did not come within 0\.01 s, or has ended"):
        peers.groups[0].check()


def test_the_host_ends_waits(device: str, make_peers: MakePeers) -> None:
    peers = make_peers(2, deadline=1e6)
    peers.groups[0].abort()
    x = torch.ones(8, device=device)
    peers.run(lambda group: ops.all_reduce(x, group.memory, 0) if group.rank == 0 else None)
    assert peers.groups[0].is_aborted


def test_errors(device: str, make_peers: MakePeers) -> None:
    [group] = make_peers(1, slot_bytes=64).groups
    x = torch.zeros(2, 4, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    cpu_memory = Group.create(1).memory
    with pytest.raises(RuntimeError, match=r"all_reduce: group must be the table of a group of GPUs, got \d+ bytes"):
        ops.all_reduce(x, cpu_memory, 0)
    with pytest.raises(RuntimeError, match=r"all_reduce: rank must be in 0\.\.0, got 1"):
        ops.all_reduce(x, group.memory, 1)
    with pytest.raises(RuntimeError, match=r"all_reduce: x and out must begin at multiples of 16 bytes on a GPU"):
        ops.all_reduce(x.view(-1)[1:], group.memory, 0)
    with pytest.raises(RuntimeError, match=r"all_gather_rows: x and out must begin at multiples of 16 bytes on a GPU"):
        ops.all_gather_rows(x.view(-1)[1:5][None], ids, group.memory, 0, 0, 8)
    with pytest.raises(RuntimeError, match=r"all_gather: a row must have between 1 and 64 bytes"):
        ops.all_gather(torch.zeros(1, 32, device=device), group.memory, 0, [32])
    with pytest.raises(ValueError, match=r"a group of GPUs must have between 1 and 8 ranks, got 9"):
        _C.peer_table([0] * 9, 2**20, 1.0, 0, None)
    with pytest.raises(ValueError, match=r"memory must have at least \d+ bytes, got 64"):
        _C.peer_table([0], 64, 1.0, 0, None)
