"""Activations that no product computes: without a gate, or with adapters, before gate and up are multiplied."""

from torch import Tensor

from fastinfer import ops


def activation_and_mul(x: Tensor, activation: str) -> Tensor:
    """Apply a gated activation, by its name in :mod:`fastinfer.ops.gemm`, to rows that contain gate, then up."""
    if activation == "silu":
        return ops.silu_and_mul(x)
    if activation == "clamped_swiglu":
        return ops.clamped_swiglu(x)
    return ops.gelu_and_mul(x, approximation(activation))


def plain_activation(x: Tensor, activation: str) -> Tensor:
    """Apply an activation without a gate, ``"relu2"``, ``"gelu_tanh"`` or ``"gelu"``."""
    return ops.relu2(x) if activation == "relu2" else ops.gelu(x, approximation(activation))


def approximation(activation: str) -> str:
    """Return how an operator computes a gelu of this name."""
    return "tanh" if activation == "gelu_tanh" else "none"
