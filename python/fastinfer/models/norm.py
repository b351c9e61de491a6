"""The norms of a decoder, and how they meet the linear layer behind them."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.weights.weight import NormOptions


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """``x / rms(x) * weight``; ``weight`` [hidden] fp32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of ``x``, added to ``residual`` if there is one."""
        return ops.rms_norm(x, self.weight, self.eps, residual)

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """What a linear layer takes: its input and the rest; it computes the norm itself."""
        return x, {"norm_weight": self.weight, "eps": self.eps}


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """``(x - mean(x)) / std(x) * weight + bias``; ``weight`` and ``bias`` [hidden] fp32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """As of :class:`RMSNorm`, but for the input, which is normalised here: no product fuses this norm."""
        return self(x), {}


Norm = RMSNorm | LayerNorm
