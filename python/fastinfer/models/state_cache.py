"""States of the layers without keys and values: what a sequence has there instead."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.models.state_config import StateConfig


@dataclass(frozen=True)
class StateCache:
    """States of one layer, in slots; a slot holds what a sequence's tokens have left behind up to one of them.

    Attributes:
        conv: [num_slots, kernel_size - 1, conv_dim], the last inputs of the convolution, in the hidden states' dtype.
        recurrent: [num_slots, *recurrent_shape] fp32, the sums of linear attention; ``None`` for a layer that only has
            a convolution.
    """

    conv: Tensor
    recurrent: Tensor | None

    @classmethod
    def empty(cls, sizes: StateConfig, num_slots: int, dtype: torch.dtype, device: str) -> "StateCache":
        """Allocate uninitialised slots; on a CPU a page takes memory only once it is written.

        Args:
            sizes: sizes of the layer.
            num_slots: number of slots.
            dtype: dtype of the hidden states.
            device: device of the cache.
        """
        conv = torch.empty(num_slots, sizes.kernel_size - 1, sizes.conv_dim, dtype=dtype, device=device)
        if sizes.recurrent_shape is None:
            return cls(conv, None)
        return cls(conv, torch.empty(num_slots, *sizes.recurrent_shape, dtype=torch.float32, device=device))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        return [self.conv] if self.recurrent is None else [self.conv, self.recurrent]


def state_bytes(sizes: StateConfig) -> int:
    """Return the size in bytes of one layer's slot for hidden states in fp32, the largest ones."""
    conv = (sizes.kernel_size - 1) * sizes.conv_dim
    return 4 * (conv + math.prod(sizes.recurrent_shape or (0,)))
