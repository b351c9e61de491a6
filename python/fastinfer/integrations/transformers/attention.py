"""Attention function of ``attn_implementation="fastinfer"``."""

from typing import Any

from torch import Tensor, nn

from fastinfer.nn.dense_cache import dense_cache_attention, is_visible

# Arguments that continuous batching adds, in the versions before 5.24 and since then.
PAGED = ("cache", "read_index", "block_table")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention over any cache of transformers.

    Args:
        module: the attention layer; its ``is_causal`` is the default of the argument.
        query: [batch, q_heads, length, head_dim]; dtypes and head sizes as in :func:`fastinfer.ops.paged_attention`.
        key, value: [batch, kv_heads, cached, head_dim].
        attention_mask: result of :func:`fastinfer.integrations.transformers.mask.attention_mask`.
        dropout: must be 0.
        scaling, sliding_window, softcap: see :func:`fastinfer.ops.paged_attention`.
        s_aux: [q_heads], logits of the attention sinks.
        is_causal: whether attention is causal; overrides the module's attribute.
        kwargs: other arguments of transformers' interface; unsupported options among them are refused.

    Returns:
        [batch, length, q_heads, head_dim], and ``None`` in place of the attention probabilities.

    Raises:
        ValueError: the call needs more than causal inference: dropout, another kind of mask, a position bias, the
            probabilities, or bidirectional attention.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = {
        "dropout": dropout > 0,
        "output_attentions": bool(kwargs.get("output_attentions")),
        "a position_bias": kwargs.get("position_bias") is not None,
        "a paged cache of transformers' continuous batching": any(kwargs.get(name) is not None for name in PAGED),
        "attention that is not causal": not causal and attention_mask is None,
        "a custom attention_mask": attention_mask is not None and not is_visible(attention_mask),
    }
    for what, is_requested in refused.items():
        if is_requested:
            raise ValueError(
                "attn_implementation='fastinfer' expects causal attention for inference, with padding and sliding "
                f"windows at most; got {what} in {type(module).__name__}"
            )
    out = dense_cache_attention(
        query.transpose(1, 2),
        key,
        value,
        attention_mask,
        scale=scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out, None
