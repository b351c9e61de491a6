"""Ranks give each other their memory: here of the host, which torch shares by the same calls as a GPU's."""

import pytest
import torch
from support.ranks import in_ranks

from fastinfer import _C
from fastinfer.parallel.group import SLOT_BYTES
from fastinfer.parallel.peer_group import PeerGroup


def test_ranks_address_the_memory_of_all_others() -> None:
    first, second = in_ranks(2, lambda group: PeerGroup.connect(group, "cpu"))
    for rank in range(2):
        first._memories[rank][rank] = 7 + rank
        assert second._memories[rank][rank] == 7 + rank
        assert first._memories[rank].numel() == _C.peer_memory_bytes(SLOT_BYTES)
    table = second.memory.view(torch.int64)
    assert table[:2].tolist() == [2, SLOT_BYTES]
    assert table[5:7].tolist() == [memory.data_ptr() for memory in second._memories]


def test_check_says_that_exchanges_ended() -> None:
    group = PeerGroup(0, [torch.zeros(_C.peer_memory_bytes(64), dtype=torch.uint8)], deadline=3)
    group.check()
    group.abort()
    with pytest.raises(RuntimeError, match="another rank did not come within 3 s, or has ended"):
        group.check()
