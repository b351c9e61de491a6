"""Ranks give each other their memory: here of the host, with a stand-in for torch's handles of a GPU's memory."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.ranks import in_ranks
from torch import Tensor

from fastinfer import _C
from fastinfer.parallel import peer_group
from fastinfer.parallel.group import SLOT_BYTES
from fastinfer.parallel.peer_group import PeerGroup


def test_ranks_address_the_memory_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    memories: dict[int, Tensor] = {}

    def share(memory: Tensor) -> bytes:
        memories[memory.data_ptr()] = memory
        return json.dumps(memory.data_ptr()).encode()

    monkeypatch.setattr(peer_group, "_share", share)
    monkeypatch.setattr(peer_group, "_open", lambda handle, _: memories[json.loads(handle)])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: True)
    first, second = in_ranks(2, lambda group: PeerGroup.connect(group, "cpu"))
    for rank in range(2):
        first._memories[rank][rank] = 7 + rank
        assert second._memories[rank][rank] == 7 + rank
        assert first._memories[rank].numel() == _C.peer_memory_bytes(SLOT_BYTES)
    table = second.memory.view(torch.int64)
    assert table[:2].tolist() == [2, SLOT_BYTES]
    assert table[5:7].tolist() == [memory.data_ptr() for memory in second._memories]


def test_gpus_without_access_to_each_other_share_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, int]] = set()
    pinned: dict[int, int] = {}

    def can_access(gpu: int, peer: int) -> bool:
        asked.add((gpu, peer))
        return (gpu, peer) != (4, 3)

    def pin(address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        pinned[address] = num_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    first, second = in_ranks(2, lambda group: PeerGroup.connect(group, f"cuda:{3 + group.rank}"))
    assert asked == {(3, 4), (4, 3)}
    num_bytes = _C.peer_memory_bytes(SLOT_BYTES)
    for rank, (own, others) in enumerate(zip(first._memories, second._memories, strict=True)):
        assert own.numel() == num_bytes
        assert own.count_nonzero() == 0
        own[rank] = 7 + rank
        assert others[rank] == 7 + rank
    for group in (first, second):  # each process pins the memory of all
        assert pinned[group._memories[0].data_ptr()] == 2 * num_bytes
        assert group._memories[1].data_ptr() == group._memories[0].data_ptr() + num_bytes
    del first, second, own, others, group
    assert not pinned


def test_memory_of_the_host_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setenv(peer_group.DISABLED, "1")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(RuntimeError, match="the memory for exchanges between GPUs cannot be pinned: 2"):
        in_ranks(2, lambda group: PeerGroup.connect(group, f"cuda:{group.rank}"))


def test_check_says_that_exchanges_ended() -> None:
    group = PeerGroup(0, [torch.zeros(_C.peer_memory_bytes(64), dtype=torch.uint8)], deadline=3)
    group.check()
    group.abort()
    with pytest.raises(RuntimeError, match="another rank did not come within 3 s, or has ended"):
        group.check()


def test_a_group_made_in_inference_mode_is_aborted_outside() -> None:
    """Ranks compute in inference mode; the code that ends them does not."""
    with torch.inference_mode():
        group = PeerGroup(0, [torch.zeros(_C.peer_memory_bytes(64), dtype=torch.uint8)])
    group.abort()
    assert group.is_aborted


class SharedStorage:
    """Stands for a storage on a GPU, which torch shares by these two methods."""

    fields = 1, b"\x00\xffhandle", 64, 0, b"counter", 3, b"", True
    device = torch.device("cpu")

    def untyped_storage(self) -> "SharedStorage":
        return self

    def _share_cuda_(self) -> tuple[int | bytes | bool, ...]:
        return self.fields


def test_handles_are_opened_by_what_torch_has_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = torch.arange(8, dtype=torch.uint8).untyped_storage()
    opened = []

    class Opener:
        @staticmethod
        def _new_shared_cuda(*fields: int | bytes | bool) -> torch.UntypedStorage:
            opened.append(fields)
            return storage

    monkeypatch.setattr(torch, "UntypedStorage", Opener)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    handle = peer_group._share(SharedStorage())  # type: ignore[arg-type]
    memory = peer_group._open(handle.ljust(peer_group.HANDLE_BYTES), torch.device("cuda", 5))
    assert opened == [(5, *SharedStorage.fields[1:])]  # on the GPU that reads the memory
    assert memory.tolist() == list(range(8))
