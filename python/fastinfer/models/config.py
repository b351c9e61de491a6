"""What a decoder looks like, read from a checkpoint's metadata."""

from dataclasses import dataclass, field

import torch

from fastinfer.errors import RequestError
from fastinfer.ops import RopeScaling

# Larger claims are not sizes of a model but damage; each stays far below what would overflow a product of two.
MAX_SIZE = 2**24


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder-only transformer.

    Attributes:
        architecture: the family's name as the file gives it.
        hidden_size, intermediate_size: widths of the residual stream and of the MLP (of one expert's, in a mixture).
        num_layers, num_heads, num_kv_heads, head_dim: of the attention; query heads share KV heads in equal groups.
        rotary_dim: elements of a head that are rotated; 0 for a model with learned positions.
        vocab_size: rows of the embedding.
        max_position: longest context, in tokens.
        norm_eps: added to the mean of squares, or to the variance.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how those are stretched.
        local_rope_theta: base of the layers with a window, unscaled, where it is another.
        windows: how many positions each layer's attention sees, 0 for all; empty: all layers see all.
        activation: of the MLP, by its name in :mod:`fastinfer.ops.gemm`.
        gated: the MLP multiplies the activated gate by a second projection.
        norm: ``"rms_norm"`` or ``"layer_norm"``.
        post_norms: attention and MLP are normalised again before they are added to the residual stream.
        qk_norm: each head of Q and K is normalised before it is rotated.
        qkv_bias, output_bias, mlp_bias: which projections have a bias.
        embedding_scale: factor of the embedding.
        attention_scale: factor of the attention's logits, ``None`` for ``head_dim ** -0.5``.
        attention_softcap, logits_softcap: ``cap * tanh(logits / cap)`` of either, 0 for none.
        num_experts: of each mixture, 0 for a model without.
        experts_per_token: chosen for each token.
        renormalize_experts: the chosen ones' probabilities are made to sum to 1.
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
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    local_rope_theta: float | None = None
    windows: tuple[int, ...] = ()
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms_norm"
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    renormalize_experts: bool = True

    def window(self, layer: int) -> int:
        """How many positions this layer's attention sees, 0 for all."""
        return self.windows[layer] if self.windows else 0


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
