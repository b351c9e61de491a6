"""Buffers that a cast of the model must not round."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """Moves of the module are followed, casts are not: buffers keep their dtype, parameters do not."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: values for name, values in self._buffers.items() if values is not None}
        super()._apply(fn, recurse)
        for name, values in before.items():
            device = getattr(self, name).device
            setattr(self, name, torch.empty_like(values, device=device) if values.is_meta else values.to(device))
        return self
