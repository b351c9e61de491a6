"""GPUs of a group within one process, for tests: streams of one GPU, or of the emulator."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastinfer import _C
from fastinfer.parallel.peer_group import PeerGroup
from support.emulator import Emulator

R = TypeVar("R")


def lone_rank(device: str) -> PeerGroup:
    """A group of one rank, in which nobody waits."""
    return PeerGroup(0, [torch.zeros(_C.peer_memory_bytes(2**12), dtype=torch.uint8, device=device)])


class Peers:
    """A group whose ranks are streams.

    Args:
        size: number of ranks.
        device: value of the ``device`` fixture.
        library: the emulated kernels; ``None`` on a GPU.
        slot_bytes: size of a slot.
        one_shot_bytes: see :class:`fastinfer.parallel.peer_group.PeerGroup`.
        deadline: longest wait in seconds; on the emulator a look at another rank's memory takes a microsecond.
        in_host: whether a GPU's ranks exchange through pinned memory of the host; the emulator has no other.
    """

    def __init__(
        self,
        size: int,
        device: str,
        library: Path | None,
        slot_bytes: int = 2**14,
        one_shot_bytes: int | None = None,
        deadline: float = 20.0,
        in_host: bool = False,
    ) -> None:
        num_bytes = _C.peer_memory_bytes(slot_bytes)
        is_pinned = in_host and library is None
        place: dict[str, Any] = {"pin_memory": True} if is_pinned else {"device": device}
        memories = [torch.zeros(num_bytes, dtype=torch.uint8, **place) for _ in range(size)]
        self.groups = [PeerGroup(rank, memories, deadline, one_shot_bytes) for rank in range(size)]
        self._emulator = Emulator(library) if library is not None else None
        self._streams = [torch.cuda.Stream() for _ in range(size)] if library is None else []

    def run(self, call: Callable[[PeerGroup], R], slow: int = -1) -> list[R]:
        """Call a function for each rank, wait for its kernels, and return the results.

        Args:
            call: launches kernels, whose inputs must stay alive until the end.
            slow: a rank that is far behind the others; -1 for none.
        """
        [results] = run_together([self], call, slow)
        return results


def run_together(lanes: Sequence[Peers], call: Callable[[PeerGroup], R], slow: int = -1) -> list[list[R]]:
    """Call a function for each rank of several groups of the same GPUs, as :meth:`Peers.run` does for one.

    Args:
        lanes: the groups, each with streams of its own.
        call: see :meth:`Peers.run`.
        slow: a rank whose stream of the last group is far behind all others; -1 for none.

    Returns:
        The results of each group.
    """
    emulator, size = lanes[0]._emulator, len(lanes[0].groups)
    if emulator is None:
        torch.cuda.synchronize()
    results: list[list[R]] = [[] for _ in lanes]
    for rank in range(size):
        for number, lane in enumerate(lanes):
            if emulator is None:
                stream = torch.cuda.stream(lane._streams[rank])
            else:
                stream = emulator.stream(number * size + rank)
            with stream:
                results[number].append(call(lane.groups[rank]))
    if emulator is None:
        torch.cuda.synchronize()
    else:
        emulator.run_streams(-1 if slow < 0 else (len(lanes) - 1) * size + slow)
    return results
