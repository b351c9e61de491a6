"""GPUs of a group within one process, for tests: streams of one GPU, or of the emulator."""

from collections.abc import Callable
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
        if self._emulator is None:
            torch.cuda.synchronize()
            results = []
            for group, stream in zip(self.groups, self._streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(call(group))
            torch.cuda.synchronize()
            return results
        results = []
        for group in self.groups:
            with self._emulator.stream(group.rank):
                results.append(call(group))
        self._emulator.run_streams(slow)
        return results
