"""What a decoder looks like, read from a checkpoint's metadata."""

from dataclasses import dataclass, field

import torch

from fastinfer.ops import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder-only transformer.

    Attributes:
        architecture: the family's name as the file gives it.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim: of the attention; query heads share KV heads in equal groups.
        rotary_dim: elements of a head that are rotated.
        vocab_size: rows of the embedding.
        max_position: longest context, in tokens.
        rms_norm_eps: added to the mean of squares.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those are stretched.
        activation: of the gated MLP, by its name in :mod:`fastinfer.ops.gemm`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    activation: str = "silu"


@dataclass(frozen=True)
class Precision:
    """How a model computes.

    Attributes:
        dtype: of the hidden states between operators.
        quantize_activations: products with quantised weights in integers.
    """

    dtype: torch.dtype
    quantize_activations: bool

    @classmethod
    def of(cls, dtype: str) -> "Precision":
        """``"auto"``: fp32 hidden states, which cost nothing beside the weights, and integer products. ``"float32"``:
        fp32 throughout. ``"bfloat16"``, ``"float16"``: hidden states of that type, and integer products."""
        if dtype in ("auto", "float32"):
            return cls(torch.float32, quantize_activations=dtype == "auto")
        return cls({"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype], quantize_activations=True)
