"""Activations that no product computes: without a gate, or with adapters, before gate and up are multiplied."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops


@dataclass(frozen=True)
class XIELU:
    """Factors of an xIELU, which each layer learns for itself.

    Attributes:
        positive, negative, beta, eps: see :func:`fastinfer.ops.xielu`.
    """

    positive: float
    negative: float
    beta: float
    eps: float


def activation_and_mul(x: Tensor, activation: str, limit: float | None = None) -> Tensor:
    """Apply a gated activation, by its name in :mod:`fastinfer.ops.gemm`, to rows that contain gate, then up.

    With ``"silu"`` both factors may have a limit, see :func:`fastinfer.ops.silu_and_mul`.
    """
    if activation == "silu":
        return ops.silu_and_mul(x, limit)
    if activation == "clamped_swiglu":
        return ops.clamped_swiglu(x)
    return ops.gelu_and_mul(x, approximation(activation))


def plain_activation(x: Tensor, activation: str | XIELU) -> Tensor:
    """Apply an activation without a gate, ``"relu2"``, ``"gelu_tanh"``, ``"gelu"`` or an xIELU."""
    if isinstance(activation, XIELU):
        return ops.xielu(x, activation.positive, activation.negative, activation.beta, activation.eps)
    return ops.relu2(x) if activation == "relu2" else ops.gelu(x, approximation(activation))


def approximation(activation: str) -> str:
    """Return how an operator computes a gelu of this name."""
    return "tanh" if activation == "gelu_tanh" else "none"
