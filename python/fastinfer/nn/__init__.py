"""Modules on the kernels of :mod:`fastinfer.ops`, with the names and states of those that transformers' decoders have.

:func:`fastinfer.integrations.transformers.replace` swaps them into a model. Each can also be used by itself. They are
for inference: no gradients.
"""

from fastinfer.nn.attention import Attention
from fastinfer.nn.linear import Linear, QuantLinear
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm
from fastinfer.nn.rotary import RotaryEmbedding

__all__ = [
    "Attention",
    "FusedMLP",
    "Linear",
    "QuantLinear",
    "RMSNorm",
    "RotaryEmbedding",
]
