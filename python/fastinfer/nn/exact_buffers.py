"""Base class of modules whose buffers a cast of the model must not round."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """Module whose buffers follow it to another device, but keep their dtype when the module is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: values for name, values in self._buffers.items() if values is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, values in before.items():
            device = getattr(self, name).device
            setattr(self, name, torch.empty_like(values, device=device) if values.is_meta else values.to(device))
        return self
