"""The memory that the processes (ranks) of a group share: exchanged activations, messages and the inputs of steps."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastinfer._C import ProcessGroup
from fastinfer.utils.interrupts import deferred_interrupts

# Size of each of the two slots for exchanged activations. Larger ones are exchanged in parts of whole rows.
SLOT_BYTES = 2**22
# Longest wait for another rank within a step. It only passes if a rank is stopped or hangs: the end of a process is
# noticed at once.
DEADLINE = 30.0
# Longest wait of a team for the whole step of another one, which computes meanwhile: minutes for a long prompt.
STEP_DEADLINE = 3600.0
MAX_RANKS = 64
MAX_MESSAGES = 64
# Seconds in which the cause of an aborted exchange becomes known, which another thread finds out.
CAUSE_SECONDS = 2.0
PAGE = mmap.ALLOCATIONGRANULARITY
ABORTED = "the group of ranks was aborted"  # the error of a rank that was not the cause, as in csrc/parallel


@dataclass(frozen=True, eq=False)
class Team:
    """One rank's view of the ranks with which it exchanges activations.

    Attributes:
        rank: number of this rank among them.
        size: number of these ranks.
        memory: [bytes] uint8, memory for exchanges, which operators of :mod:`fastinfer.ops.parallel` use.
    """

    rank: int
    size: int
    memory: Tensor


class Group:
    """One rank's view of a group.

    The memory has no name in the file system: it is gone with the last process that uses it.

    Args:
        rank: number of this rank.
        size: number of ranks.
        memory_fd: file descriptor of the memory for exchanges and messages.
        inputs_fd: file descriptor of the memory for the inputs of steps.
        purpose: what the ranks do together, for messages of rank 0.
        team_size: number of consecutive ranks that exchange activations with each other; ``None`` for all.

    Attributes:
        rank, size, purpose: see above.
        fds: both file descriptors, for the processes of other ranks.
        cause: why the group was aborted; empty while it works, and where another rank knows the cause.
        on_abort: functions that are called once this rank has aborted the group.
        memory: [bytes] uint8, memory for exchanges of all ranks.
        team: the ranks that exchange activations with this one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory_fd: int,
        inputs_fd: int,
        purpose: str = "tensor parallelism",
        team_size: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.purpose = purpose
        self.fds = memory_fd, inputs_fd
        team_size = team_size or size
        num_bytes = ProcessGroup.num_bytes(SLOT_BYTES)
        shared = np.frombuffer(mmap.mmap(memory_fd, num_bytes * num_parts(size, team_size)), np.uint8)
        self.memory = torch.from_numpy(shared[:num_bytes])
        start = 0 if team_size == size else (1 + rank // team_size) * num_bytes
        self.team = Team(rank % team_size, team_size, torch.from_numpy(shared[start : start + num_bytes]))
        self._group = ProcessGroup(shared, rank)
        self.on_abort: list[Callable[[], None]] = []
        self.cause = ""
        self._has_cause = threading.Event()
        self._pid = os.getpid()
        self._end_of_inputs = 0

    @classmethod
    def create(
        cls,
        size: int,
        deadline: float | None = None,
        num_messages: int = 1,
        purpose: str = "tensor parallelism",
        team_size: int | None = None,
    ) -> "Group":
        """Allocate the memory of a group, and return the view of rank 0.

        Args:
            size: number of ranks, at most ``MAX_RANKS``.
            deadline: longest wait for another rank of the team in seconds; ``DEADLINE`` by default. If there are
                several teams, one waits for the steps of another for up to ``STEP_DEADLINE``.
            num_messages: number of messages that may be sent before the first of them is carried out, at most
                ``MAX_MESSAGES``.
            purpose, team_size: see :class:`Group`.
        """
        team_size = team_size or size
        fds = [os.memfd_create(f"fastinfer-{name}", os.MFD_CLOEXEC) for name in ("group", "inputs")]
        num_bytes = ProcessGroup.num_bytes(SLOT_BYTES)
        all_bytes = num_bytes * num_parts(size, team_size)
        os.ftruncate(fds[0], all_bytes)
        memory = mmap.mmap(fds[0], all_bytes)
        deadline = DEADLINE if deadline is None else deadline
        ProcessGroup.initialize(memory, size, SLOT_BYTES, deadline, num_messages)
        for part in range(1, num_parts(size, team_size)):
            ProcessGroup.initialize_team(memory, part * num_bytes, (part - 1) * team_size, team_size)
        if team_size < size:  # teams have taken over the deadline, and keep theirs
            ProcessGroup.initialize(memory, size, SLOT_BYTES, STEP_DEADLINE, num_messages)
        group = cls(0, size, fds[0], fds[1], purpose, team_size)
        for fd in fds:
            weakref.finalize(group, os.close, fd)
        return group

    def team_ranks(self, number: int) -> range:
        """Return the ranks of a team."""
        return range(number * self.team.size, (number + 1) * self.team.size)

    def allocate_inputs(self, num_bytes: int) -> np.ndarray:
        """Return memory for the inputs of steps, [num_bytes] uint8, filled with zeros before a rank writes to it.

        It is the same on all ranks, which call this for the same sizes in the same order.
        """
        start, self._end_of_inputs = self._end_of_inputs, self._end_of_inputs + -(-num_bytes // PAGE) * PAGE
        # Makes the file as long. Another rank may have made it longer already, and ftruncate would cut that off.
        os.posix_fallocate(self.fds[1], self._end_of_inputs - 1, 1)
        return np.frombuffer(mmap.mmap(self.fds[1], num_bytes, offset=start), np.uint8)

    def send(self, words: list[int]) -> None:
        """Send all other ranks a message, once they have carried out enough of the last ones; only for rank 0.

        Raises:
            RuntimeError: a rank has ended, or did not carry out an earlier message before the deadline.
        """
        self._group.send(words)

    def receive(self) -> list[int]:
        """Wait for a message of rank 0; only for other ranks, which then call :meth:`finish`.

        Raises:
            RuntimeError: the group was aborted.
        """
        return self._group.receive()

    def finish(self) -> None:
        """Tell the other ranks that the message was carried out."""
        self._group.finish()

    def wait_for(self, rank: int) -> None:
        """Wait until another rank has finished the message that this rank carries out now.

        Raises:
            RuntimeError: the group was aborted, or the other rank did not finish before the deadline.
        """
        self._group.wait_for(rank)

    def start_together(self) -> None:
        """Wait for rank 0, however long it needs. It calls this once all others are about to, which it must know.

        Raises:
            RuntimeError: the group was aborted.
        """
        with self.together():
            if self.rank == 0:
                self.send([])
            else:
                self.receive()
            self.finish()

    def end_message(self, cause: object) -> str:
        """Return the message of errors after the group has ended for a cause."""
        return f"{self.purpose} ended: {cause}"

    def abort(self, cause: str = "") -> None:
        """End all exchanges of all ranks, now and later, with an error.

        Args:
            cause: why, for this process; the first cause counts.
        """
        if cause and not self.cause:
            self.cause = cause
            self._has_cause.set()
        self._group.abort()
        for call in self.on_abort:
            call()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Abort the group if the code in the ``with`` block fails: the other ranks would wait for this one in vain.

        Ctrl-C takes effect after the block.

        Raises:
            RuntimeError: an exchange failed; the message has the cause. Or this process was forked from rank 0.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"a forked process cannot use {self.purpose}: the other ranks are its parent's")
        try:
            with deferred_interrupts():
                yield
        except KeyboardInterrupt:  # after the block
            raise
        except RuntimeError as error:
            self.abort("" if is_abort(error) else str(error))
            self._has_cause.wait(CAUSE_SECONDS)
            raise RuntimeError(self.end_message(self.cause or error)) from error
        except BaseException:
            self.abort()
            raise

    @property
    def exchanged(self) -> tuple[int, int]:
        """Numbers of exchanges and of bytes that this rank has sent since the start."""
        return self._group.exchanged()


def num_parts(size: int, team_size: int) -> int:
    """Return the number of parts of a group's memory: one for all ranks, and one for each team unless it has all."""
    return 1 if team_size == size else 1 + size // team_size


def is_abort(error: BaseException) -> bool:
    """Return whether an error says that another rank has aborted the group."""
    return ABORTED in str(error)
