"""Activations of an MLP whose gate and up are not yet multiplied, as in a step with LoRA adapters."""

from torch import Tensor

from fastinfer import ops


def activation_and_mul(x: Tensor, activation: str) -> Tensor:
    """Apply a gated activation, by its name in :mod:`fastinfer.ops.gemm`, to rows that contain gate, then up."""
    return ops.silu_and_mul(x) if activation == "silu" else ops.gelu_and_mul(x, approximation(activation))


def approximation(activation: str) -> str:
    """Return how an operator computes a gelu of this name."""
    return "tanh" if activation == "gelu_tanh" else "none"
