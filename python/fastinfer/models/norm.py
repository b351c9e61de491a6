"""Norms of a decoder, computed alone or fused into the linear layer that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.weights.weight import NormOptions


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """RMSNorm, ``x / rms(x) * weight``; ``weight`` is [hidden] fp32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Compute the norm of ``x``, add ``residual`` if there is one, and multiply by ``factor``."""
        return ops.rms_norm(x, self.weight, self.eps, residual, factor)

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """Return the input of a linear layer and the options that make it compute the norm."""
        return x, {"norm_weight": self.weight, "eps": self.eps}


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """LayerNorm, ``(x - mean(x)) / std(x) * weight + bias``; ``weight`` and ``bias`` are [hidden] fp32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """Return the normalised input and no options, because no product fuses this norm."""
        return self(x), {}


@dataclass(frozen=True, eq=False)
class NoNorm:
    """No norm: a linear layer gets its input as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """Return the input and no options."""
        return x, {}


def factor_norm(factor: float, size: int, device: str) -> RMSNorm:
    """Make an RMSNorm that multiplies a row of ``size`` elements by a factor, where an operator takes only a norm."""
    # Beside this eps the mean of squares has no effect. Its root is a power of two, so nothing is rounded.
    root = 2.0**30
    return RMSNorm(torch.full((size,), factor * root, dtype=torch.float32, device=device), root**2)


Norm = RMSNorm | LayerNorm | NoNorm
