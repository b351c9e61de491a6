"""Joining the columns of tensors by an operator, so that a recorded graph repeats it."""

import torch
from torch import Tensor

from fastinfer import ops


class ColumnJoin:
    """Joins the columns of tensors.

    Args:
        count: number of the tensors.
        max_rows: largest number of their rows.
        device: their device.
    """

    def __init__(self, count: int, max_rows: int, device: torch.device) -> None:
        places = torch.arange(count * max_rows, device=device).view(max_rows, count)
        self._slots = places.T.contiguous()

    def __call__(self, parts: list[Tensor]) -> Tensor:
        """Return the tensors, each [rows, width], beside each other: [rows, count * width]."""
        count, (rows, width) = len(parts), parts[0].shape
        # The result as a cache with a block for each row and a slot for each of its parts.
        joined = parts[0].new_empty(rows, count, 1, width)
        for part, slots in zip(parts, self._slots, strict=True):
            values = part[:, None]
            ops.store_kv_cache(values, values, joined, joined, slots[:rows])
        return joined.view(rows, count * width)
