"""Configuration of a decoder: its sizes and constants, and the precision in which it computes."""

from dataclasses import dataclass, field

import torch

from fastinfer.errors import RequestError
from fastinfer.ops import RopeScaling

# A larger size in a file means that it is damaged; the product of two sizes up to this limit cannot overflow.
MAX_SIZE = 2**24


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a decoder-only transformer.

    Attributes:
        architecture: name of the model family in the file.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP, or of one expert.
        num_layers: number of layers.
        num_heads, num_kv_heads: number of query heads, and of key and value heads; equal groups of query heads share
            a KV head.
        head_dim: number of elements of a head.
        rotary_dim: number of rotated elements of a head; 0 for a model with learned positions.
        vocab_size: number of tokens, the rows of the embedding.
        draft_vocab_size: number of tokens that a draft model can draft, the rows of its output layer; 0 for all.
        max_position: longest context in tokens.
        norm_eps: number added to the mean of squares, or to the variance.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies.
        local_rope_theta: base in the layers with a window, without scaling; ``None`` to use the same table in all
            layers.
        windows: length of each layer's attention window in positions, 0 for none; empty if no layer has a window.
        activation: activation of the MLP, by its name in :mod:`fastinfer.ops.gemm`.
        gated: whether the MLP multiplies the activated gate by a second projection.
        norm: ``"rms_norm"`` or ``"layer_norm"``.
        post_norms: whether the outputs of attention and MLP are normalised before they are added to the residual
            stream.
        qk_norm: whether each head of Q and K is normalised before it is rotated.
        qkv_bias, output_bias, mlp_bias: whether these projections have a bias.
        embedding_scale: factor of the embedding.
        attention_scale: factor of the attention logits, ``None`` for ``head_dim ** -0.5``.
        attention_softcap, logits_softcap: caps of the attention logits and of the logits, 0 for none.
        num_experts: number of experts per layer, 0 for a model without experts.
        experts_per_token: number of experts chosen for each token.
        renormalize_experts: whether the weights of the chosen experts are divided by their sum.
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
    draft_vocab_size: int = 0
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
        """Return the length of a layer's attention window in positions, 0 for none."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True)
class Precision:
    """Precision in which a model computes.

    Attributes:
        dtype: dtype of the hidden states between operators.
        activation_bits: precision of the inputs of products with quantised weights.
        logits_activation_bits: the same for the product that computes the logits. Its errors are errors of the logits,
            and its time is that of reading the weight, so 16 bits cost little. With 8 bits it caused a third of the
            divergence from fp32 on SmolLM2.
        kv_cache_dtype: dtype of the cached keys and values.
    """

    dtype: torch.dtype
    activation_bits: int
    logits_activation_bits: int
    kv_cache_dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether neither weights nor activations may be rounded."""
        return self.dtype == torch.float32 and self.activation_bits == 32

    @classmethod
    def of(cls, dtype: str, device: str = "cpu") -> "Precision":
        """Choose the precision for a user's ``dtype``.

        On a CPU, ``"float32"`` computes everything in fp32. ``"auto"`` has fp32 hidden states, whose cost is negligible
        compared with the weights, and integer products. ``"bfloat16"`` and ``"float16"`` have integer products with
        hidden states of that dtype. The KV cache of ``"auto"`` is fp16, which has three more bits of mantissa than bf16
        at the same speed.

        On a GPU, hidden states and KV cache are fp16 for ``"float16"``, else bf16; inputs of products are not
        quantised.

        Raises:
            RequestError: ``dtype`` is ``"float32"`` on a GPU.
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
