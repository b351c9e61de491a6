"""Memory that all GPUs of a group address, for the exchange of activations; not yet run on several GPUs."""

import json
import os
import weakref
from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

from fastinfer import _C, ops
from fastinfer.parallel.group import DEADLINE, SLOT_BYTES, Group, Team

# Room for the handle of a rank's memory, which ranks exchange like activations.
HANDLE_BYTES = 4096
# If this variable is 1, GPUs do not use each other's memory: on some machines CUDA offers it, but it does not work.
DISABLED = "FASTINFER_P2P_DISABLE"
TABLE_BYTES = len(_C.peer_table([0], _C.peer_memory_bytes(SLOT_BYTES), DEADLINE, 0, None))


class PeerGroup:
    """One rank's view of the GPUs of a group, for the operators of :mod:`fastinfer.ops.parallel`.

    Args:
        rank: number of this rank.
        memories: [bytes] uint8 of each rank, as this process addresses them; zeros before the first exchange.
        deadline: longest wait for another rank in seconds.
        one_shot_bytes: size of the largest sum for which each rank reads all parts; larger ones are summed in shares.
            The same on all ranks; ``None`` for what suits their number.

    Attributes:
        rank, size: number of this rank, and of all ranks.
        memory: [bytes] uint8 in host memory, the table of addresses that operators take as ``group``.
    """

    def __init__(
        self, rank: int, memories: Sequence[Tensor], deadline: float = DEADLINE, one_shot_bytes: int | None = None
    ) -> None:
        self.rank = rank
        self.size = len(memories)
        self._memories = list(memories)
        self._deadline = deadline
        is_addressed_by_gpus = memories[rank].is_cuda or memories[rank].is_pinned()
        with torch.inference_mode(False):  # abort() is also called by threads outside inference mode
            self._aborted = torch.zeros(1, dtype=torch.int64, pin_memory=is_addressed_by_gpus)
        addresses = [memory.data_ptr() for memory in memories]
        table = _C.peer_table(addresses, memories[rank].numel(), deadline, self._aborted.data_ptr(), one_shot_bytes)
        self.memory = torch.frombuffer(bytearray(table), dtype=torch.uint8)

    @classmethod
    def connect(cls, group: Group, device: str) -> "PeerGroup":
        """Allocate memory that the GPUs of all ranks address, and return this rank's view; all ranks call it together.

        Args:
            group: the ranks' processes. Each must see all GPUs, which have consecutive numbers.
            device: GPU of this rank.

        Raises:
            RuntimeError: a rank did not come, or the memory cannot be shared.
        """
        own = torch.device(device)
        first = (own.index or 0) - group.rank
        peers = have_peer_access(range(first, first + group.size))
        return cls(group.rank, _memories_of_gpus(group, own) if peers else _memories_of_host(group, own))

    @property
    def is_aborted(self) -> bool:
        """Whether a kernel has waited in vain, or :meth:`abort` was called: results since then mean nothing.

        It is known once the kernel has ended, so ask after waiting for a step.
        """
        return bool(self._aborted.item())

    def abort(self) -> None:
        """End all waits of this rank's kernels, now and later."""
        self._aborted.fill_(1)

    def check(self) -> None:
        """Check that all exchanges until now have succeeded.

        Raises:
            RuntimeError: a rank did not come in time, or the group was aborted.
        """
        if self.is_aborted:
            raise RuntimeError(
                f"an exchange between GPUs was aborted: another rank did not come within {self._deadline:g} s, "
                "or has ended"
            )


def unconnected_team(group: Group) -> Team:
    """Return this rank's view of the ranks of a group as GPUs, with which its part of a model is loaded.

    Its memory is all zeros until the table of a :class:`PeerGroup` is copied there.
    """
    return Team(group.rank, group.size, torch.zeros(TABLE_BYTES, dtype=torch.uint8))


def have_peer_access(gpus: Sequence[int]) -> bool:
    """Return whether GPUs address each other's memory; otherwise they exchange through memory of the host."""
    return os.environ.get(DISABLED) != "1" and all(
        torch.cuda.can_device_access_peer(gpu, peer) for gpu, peer in permutations(gpus, 2)
    )


def _memories_of_gpus(group: Group, device: torch.device) -> list[Tensor]:
    """Allocate this rank's memory on its GPU, and open that of all others by handles, which ranks exchange."""
    own = torch.zeros(_C.peer_memory_bytes(SLOT_BYTES), dtype=torch.uint8, device=device)
    if own.is_cuda:
        torch.cuda.synchronize(own.device)
    handle = torch.frombuffer(bytearray(_share(own).ljust(HANDLE_BYTES)), dtype=torch.float32)[None]
    handles = ops.all_gather(handle, group.memory, group.rank, [handle.numel()] * group.size)
    parts = [part.numpy().tobytes() for part in handles.view(torch.uint8).split(HANDLE_BYTES, 1)]
    return [own if rank == group.rank else _open(part, own.device) for rank, part in enumerate(parts)]


def _memories_of_host(group: Group, device: torch.device) -> list[Tensor]:
    """Allocate memory of the host for all ranks, which their processes share, and pin it for this rank's GPU."""
    num_bytes = _C.peer_memory_bytes(SLOT_BYTES)
    memory = group.allocate_inputs(group.size * num_bytes)
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) != 0:
        raise RuntimeError(f"the memory for exchanges between GPUs cannot be pinned: {error}")
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)
    return list(torch.from_numpy(memory).split(num_bytes))


def _share(memory: Tensor) -> bytes:
    """Return a handle by which other processes can open this memory of a GPU, as JSON: nothing is pickled."""
    fields = memory.untyped_storage()._share_cuda_()
    return json.dumps([field.hex() if isinstance(field, bytes) else field for field in fields]).encode()


def _open(handle: bytes, device: torch.device) -> Tensor:
    """Return the memory of another process, [bytes] uint8, for a GPU of this one."""
    _, *fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in json.loads(handle)]
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)  # opened where kernels read it
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
