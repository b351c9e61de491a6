"""RMSNorm module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.weights.weight import NormOptions


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, computed by :func:`fastinfer.ops.rms_norm`.

    Args:
        hidden_size: size of the last dimension.
        eps: number added to the mean of squares.
        unit_offset: scale by ``1 + weight`` instead of ``weight``, as Gemma does.
        device, dtype: device and dtype of the weight.
    """

    scale: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        unit_offset: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        fill = torch.zeros if unit_offset else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, device=device, dtype=dtype), requires_grad=False)
        self.variance_epsilon = eps
        self.unit_offset = unit_offset
        # Added once instead of in every call, and in fp32, as Gemma does.
        self.scale = nn.Buffer(1.0 + self.weight.float(), persistent=False) if unit_offset else None
        self.register_load_state_dict_post_hook(_set_scale)  # type: ignore[no-untyped-call]

    @classmethod
    def from_weight(cls, weight: nn.Parameter, eps: float, unit_offset: bool) -> "RMSNorm":
        """Create a norm that uses ``weight`` without copying it."""
        norm = cls(weight.shape[0], eps, unit_offset, device="meta")
        norm.weight = weight
        _set_scale(norm)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.as_options()
        return ops.rms_norm(x.contiguous(), norm["norm_weight"], norm["eps"])

    def as_options(self) -> NormOptions:
        """Return the options with which a linear layer computes this norm of its input."""
        return {"norm_weight": self.weight if self.scale is None else self.scale, "eps": self.variance_epsilon}

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, unit_offset={self.unit_offset}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RMSNorm":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _set_scale(self)  # restores fp32 after a cast
        return self


def _set_scale(norm: RMSNorm, _: Any = None) -> None:
    if norm.scale is not None:
        norm.scale = 1.0 + norm.weight.detach().float()
