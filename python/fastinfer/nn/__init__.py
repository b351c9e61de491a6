"""PyTorch modules that run the kernels of :mod:`fastinfer.ops`, for inference only (no gradients).

They have the names and state dictionaries of the corresponding modules in transformers' decoders, into which
:func:`fastinfer.integrations.transformers.replace` puts them. Each can also be used by itself.
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
