"""A block of the KV cache, or a slot of states, in memory that all ranks share, on its way to a store or back."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fastinfer.parallel.group import Group


class SharedBlock:
    """The bytes that a block, or a slot of states, has in the caches of all ranks, in the order of the ranks.

    Args:
        group: the group of ranks. Each of them makes a shared block, rank 0 after all others.
        own_bytes: size of a block in this rank's cache.
    """

    def __init__(self, group: Group, own_bytes: int) -> None:
        self._group = group
        self._sizes = group.allocate_inputs(8 * group.size).view(np.int64)
        self._sizes[group.rank] = own_bytes

    @property
    def num_bytes(self) -> int:
        """Size of a block in all caches together."""
        return int(self._sizes.sum())

    @cached_property
    def memory(self) -> Tensor:
        """[num_bytes] uint8; all ranks use it for the first time with the same message."""
        return torch.from_numpy(self._group.allocate_inputs(self.num_bytes))

    @property
    def own(self) -> Tensor:
        """The part of this rank, [own_bytes] uint8."""
        end = int(self._sizes[: self._group.rank + 1].sum())
        return self.memory[end - int(self._sizes[self._group.rank]) : end]
