"""Attention over the dense keys and values of transformers' caches, [batch, kv_heads, length, head_dim].

Such a tensor is treated as a paged cache with one KV head: every head of every sequence becomes a sequence of its own,
whose only page is as long as the cache. If sequences are padded at the start, every position is a page instead.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fastinfer import ops


def is_visible(mask: Tensor) -> bool:
    """Return whether a mask has the form that :func:`dense_cache_attention` takes as ``visible``."""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.shape[3] in (1, 2)


@lru_cache(maxsize=8)
def _one_page_each(sequences: int, length: int, cached: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return block table, lengths and query starts of sequences with one page each, all of which is visible."""
    numbers = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    return numbers[:-1, None].contiguous(), torch.full_like(numbers[:-1], cached), numbers * length


def dense_cache_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention for the last ``length`` positions of each sequence.

    Args:
        q: [batch, length, q_heads, head_dim]; dtypes and head sizes as in :func:`fastinfer.ops.paged_attention`.
        k, v: [batch, kv_heads, cached, head_dim], dtype of ``q``.
        visible: positions of the sequences in the cache, int32: their ends as [batch, 1, 1, 1], or first positions and
            ends as [batch, 1, 1, 2]; ``None`` for 0 to ``cached``. The last query has the last position before the end.
            Queries before the first position give 0.
        scale, window, softcap: see :func:`fastinfer.ops.paged_attention`.
        sinks: [q_heads], logits of the attention sinks.

    Returns:
        [batch, length, q_heads, head_dim].

    Raises:
        ValueError: ``visible`` has another form, such as a mask for every pair of positions.
    """
    if visible is not None and not is_visible(visible):
        raise ValueError(
            "attention_mask must be None, or the mask of transformers' attn_implementation='fastinfer' (int32 of "
            f"[batch, 1, 1, 1 or 2]), got {visible.dtype} of {tuple(visible.shape)}"
        )
    batch, length, q_heads, head_dim = q.shape
    if batch == 0 or length == 0:
        return q.new_empty([batch, length, q_heads, v.shape[-1]])
    kv_heads, cached = k.shape[1:3]
    sequences, group, device = batch * kv_heads, q_heads // max(kv_heads, 1), q.device
    # Torch calls slow down decoding on the CPU, so none is made without need: with one query each, rows are in order.
    grouped = q if length == 1 else q.unflatten(2, (kv_heads, group)).transpose(1, 2).contiguous()
    rows = grouped.reshape(-1, group, head_dim)
    # All layers of a step need the same table, so it is cached, except while tracing or capturing a CUDA graph.
    traced = torch.compiler.is_compiling() or type(q) is not Tensor or q.is_cuda
    table, lengths, starts = (_one_page_each.__wrapped__ if traced else _one_page_each)(
        sequences, length, cached, device
    )
    page = cached
    if visible is not None:
        bounds = visible.view(batch, -1).repeat_interleave(kv_heads, 0)
        lengths = bounds[:, -1].contiguous()
        if bounds.shape[1] == 2:
            first = bounds[:, :1]
            table = table * cached + first + torch.arange(cached, dtype=torch.int32, device=device)
            lengths, page = lengths - first[:, 0], 1
    lse = None if sinks is None else torch.empty(rows.shape[:2], dtype=torch.float32, device=device)
    out = ops.paged_attention(
        rows,
        k.contiguous().view(-1, page, 1, head_dim),
        v.contiguous().view(-1, page, 1, v.shape[-1]),
        table,
        lengths,
        starts,
        scale=scale,
        window=window,
        softcap=softcap,
        lse=lse,
    )

    def in_order(rows: Tensor) -> Tensor:
        """Reorder [batch * kv_heads * length, group, ...] to [batch, length, q_heads, ...]."""
        if length > 1:
            rows = rows.unflatten(0, (batch, kv_heads, length)).transpose(1, 2)
        return rows.reshape(batch, length, q_heads, -1)

    if sinks is None or lse is None:
        return in_order(out)
    # A sink is one more logit in the softmax's denominator, which scales every probability.
    return (in_order(out) * (in_order(lse) - sinks.float()[:, None]).sigmoid()).to(q.dtype)
