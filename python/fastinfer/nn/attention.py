"""Causal self-attention module: one product for Q, K and V, rotary embedding in place, attention over any cache."""

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.nn.dense_cache import dense_cache_attention
from fastinfer.nn.linear import make_linear
from fastinfer.nn.merged_linear import merge_linears, name_rows
from fastinfer.nn.rms_norm import RMSNorm
from fastinfer.nn.rotary import rotary_table
from fastinfer.weights.weight import NormOptions


class Attention(nn.Module):
    """Grouped-query attention with the call signature of transformers' attention modules.

    The state dictionary keeps the names of the original layers, whether dense or quantised.

    Args:
        q_proj, k_proj, v_proj: linear layers [hidden -> heads * head_dim], with a multiple of 16 outputs each.
        o_proj: linear layer [q_heads * head_dim -> hidden].
        head_dim: number of elements of a head.
        layer_idx: index of the layer in the cache.
        scaling: factor of the logits; ``head_dim ** -0.5`` by default.
        sliding_window: number of positions that a query sees, ``None`` for all.
        softcap: bound of the logits, which become ``softcap * tanh(logits / softcap)``; ``None`` for none.
        sinks: [q_heads], see :func:`fastinfer.ops.paged_attention`.
        q_norm, k_norm: norms applied to each head before the rotary embedding; ``None`` for none.
        quantize: a kind of :class:`QuantLinear`, or ``None`` for dense weights.
        group_size, activation_bits: see :class:`QuantLinear`.

    Raises:
        ValueError: the layers do not fit together, or no kernel supports them.
    """

    is_causal = True

    def __init__(
        self,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
        *,
        head_dim: int,
        layer_idx: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        quantize: str | None = None,
        group_size: int | None = None,
        activation_bits: int = 8,
    ) -> None:
        super().__init__()
        sizes = [layer.out_features for layer in (q_proj, k_proj, v_proj)]
        if any(size % head_dim for size in sizes) or sizes[1] != sizes[2] or sizes[0] % sizes[1]:
            raise ValueError(f"q, k and v must be whole heads of {head_dim}, as many of k as of v, got {sizes} rows")
        self.head_dim, self.layer_idx, self.scaling = head_dim, layer_idx, scaling
        self.heads = [size // head_dim for size in sizes]
        self.sliding_window, self.softcap = sliding_window, softcap
        self.qkv_proj = merge_linears([q_proj, k_proj, v_proj], False, quantize, group_size, activation_bits)
        self.o_proj = make_linear(o_proj, quantize, group_size, activation_bits)
        self.q_norm, self.k_norm, self.sinks = q_norm, k_norm, sinks
        name_rows(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes, interleaved=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        is_causal: bool | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention over the cache and the new tokens.

        Args:
            hidden_states: [batch, length, hidden].
            position_embeddings: output of :class:`RotaryEmbedding`, or transformers' cosines and sines; ``None`` for no
                rotary embedding.
            attention_mask: mask that transformers makes for ``attn_implementation="fastinfer"`` (``visible`` of
                :func:`fastinfer.nn.dense_cache.dense_cache_attention`); with ``None`` each position sees all before it.
            cache: a transformers cache, whose ``update(k, v, layer_idx)`` stores [batch, kv_heads, length, head_dim]
                and returns all cached positions; with ``None`` only the new tokens are seen.
            past_key_values: the same under its name before transformers 5.24.
            is_causal: must not be False.
            output_attentions: must be False.

        Returns:
            [batch, length, hidden], and ``None`` in place of transformers' attention probabilities.

        Raises:
            ValueError: the mask is of another kind, or non-causal attention or the probabilities are requested.
        """
        check_computable(is_causal, output_attentions)
        batch, length, hidden = hidden_states.shape
        rows = hidden_states.reshape(batch * length, hidden)
        cache = past_key_values if cache is None else cache
        out = self.attend(rows, (batch, length), position_embeddings, attention_mask, cache)
        return out.view(batch, length, out.shape[1]), None

    def attend(
        self,
        x: Tensor,
        shape: tuple[int, int],
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Any,
        residual: Tensor | None = None,
        **norm: Unpack[NormOptions],
    ) -> Tensor:
        """Compute :meth:`forward` for ``x`` [batch * length, hidden], with an optional norm before and sum after it.

        ``shape`` has the batch and the length.
        """
        batch, length = shape
        q_heads, kv_heads, _ = self.heads
        heads = self.qkv_proj(x, **norm).view(batch * length, sum(self.heads), self.head_dim)
        q, k, v = heads.split(self.heads, 1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if position_embeddings is not None:
            table, positions = rotary_table(position_embeddings, batch, length)
            ops.rotary_embedding(q, k, positions, table)
        k, v = (t.view(batch, length, kv_heads, self.head_dim).transpose(1, 2) for t in (k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = dense_cache_attention(
            q.view(batch, length, q_heads, self.head_dim),
            k,
            v,
            attention_mask,
            scale=self.scaling,
            window=self.sliding_window or 0,
            softcap=self.softcap or 0.0,
            sinks=self.sinks,
        )
        projected: Tensor = self.o_proj(out.reshape(batch * length, q_heads * self.head_dim), residual=residual)
        return projected

    def extra_repr(self) -> str:
        q_heads, kv_heads, _ = self.heads
        return f"q_heads={q_heads}, kv_heads={kv_heads}, head_dim={self.head_dim}, sliding_window={self.sliding_window}"


def check_computable(is_causal: bool | None, output_attentions: bool) -> None:
    """Raise ValueError for options of transformers' attention that the kernel does not support."""
    if is_causal is False:
        raise ValueError("is_causal must be True or None: fastinfer.nn.Attention is causal, got False")
    if output_attentions:
        raise ValueError(
            "output_attentions must be False: fastinfer.nn.Attention never stores the whole probabilities, got True"
        )
