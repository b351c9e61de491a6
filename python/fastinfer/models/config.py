"""What a decoder looks like, read from a checkpoint's metadata."""

from dataclasses import dataclass, field

import torch

from fastinfer.errors import RequestError
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
        activation_bits: precision of the inputs of products with quantised weights.
        logits_activation_bits: likewise for the last one. Its error is the logits' own, and it is bound by reading its
            weight: 16 bits cost little there. With 8 they caused a third of the divergence from fp32 on SmolLM2.
        kv_cache_dtype: of the cached keys and values.
    """

    dtype: torch.dtype
    activation_bits: int
    logits_activation_bits: int
    kv_cache_dtype: torch.dtype

    @classmethod
    def of(cls, dtype: str, device: str = "cpu") -> "Precision":
        """The precision that a user's ``dtype`` stands for.

        ``"float32"`` is fp32 throughout. ``"auto"`` keeps fp32 hidden states, which cost nothing beside the weights,
        and multiplies in integers; ``"bfloat16"`` and ``"float16"`` do so with hidden states of that type. The cache
        of ``"auto"`` is fp16: three more bits of mantissa than bf16, at the same speed.

        A GPU multiplies 16-bit numbers, bf16 for ``"auto"``, by weights as they are; its cache has the same dtype.

        Raises:
            RequestError: fp32 on a GPU.
        """
        if device != "cpu":
            if dtype == "float32":
                raise RequestError(f"dtype must be auto, bfloat16 or float16 on device {device!r}, got 'float32'")
            half = torch.float16 if dtype == "float16" else torch.bfloat16
            return cls(half, 32, 32, half)
        if dtype == "float32":
            return cls(torch.float32, 32, 32, torch.float32)
        if dtype == "auto":
            return cls(torch.float32, 8, 16, torch.float16)
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        return cls(half, 8, 16, half)
