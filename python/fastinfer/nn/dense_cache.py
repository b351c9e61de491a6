"""Attention over keys and values as transformers' caches hold them: [batch, kv_heads, length, head_dim].

Such a tensor is a paged cache of one KV head: every head of every sequence is a sequence of its own, whose only page is
as long as the cache. Where a sequence begins later, after padding, the pages are its positions one by one.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fastinfer import ops


def is_visible(mask: Tensor) -> bool:
    """Whether a mask is one of :func:`dense_cache_attention`."""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.shape[3] in (1, 2)


@lru_cache(maxsize=8)
def _whole(sequences: int, length: int, cached: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Block table, lengths and query starts of sequences that have one page each, all of it visible."""
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
    """Causal attention of the last ``length`` positions of each sequence.

    Args:
        q: [batch, length, q_heads, head_dim]; dtypes and head sizes as in :func:`fastinfer.ops.paged_attention`.
        k, v: [batch, kv_heads, cached, head_dim], dtype of ``q``.
        visible: where the sequences lie in the cache, int32: [batch, 1, 1, 1], their ends, or [batch, 1, 1, 2], first
            positions and ends. ``None``: from 0 to ``cached``. The last query stands at the last position before the
            end; queries before the first position give 0.
        scale, window, softcap: as in :func:`fastinfer.ops.paged_attention`.
        sinks: [q_heads].

    Returns:
        [batch, length, q_heads, head_dim].

    Raises:
        ValueError: ``visible`` is something else, such as a mask for every pair of positions.
    """
    if visible is not None and not is_visible(visible):
        raise ValueError(
            "attention_mask must be None, or what transformers makes for attn_implementation='fastinfer' (int32 of "
            f"[batch, 1, 1, 1 or 2]), got {visible.dtype} of {tuple(visible.shape)}"
        )
    batch, length, q_heads, head_dim = q.shape
    kv_heads, cached = k.shape[1:3]
    sequences, group, device = batch * kv_heads, q_heads // max(kv_heads, 1), q.device
    # Calls are a step's cost on a CPU: with one query each, rows stand in the order of heads already.
    grouped = q if length == 1 else q.unflatten(2, (kv_heads, group)).transpose(1, 2)
    rows = grouped.reshape(-1, group, head_dim)
    # Layers of a step ask for the same; what is traced, or captured in a CUDA graph, must not be kept.
    traced = torch.compiler.is_compiling() or type(q) is not Tensor or q.is_cuda
    table, lengths, starts = (_whole.__wrapped__ if traced else _whole)(sequences, length, cached, device)
    page = cached
    if visible is not None:
        bounds = visible.view(batch, -1).repeat_interleave(kv_heads, 0)
        lengths = bounds[:, -1].contiguous()
        if bounds.shape[1] == 2:
            first = bounds[:, :1]
            table = table * cached + first + torch.arange(cached, dtype=torch.int32, device=device)
            lengths, page = lengths - first[:, 0], 1
    lse = None if sinks is None else torch.empty(rows.shape[:2], device=device)
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
        """[batch * kv_heads * length, group, ...] as [batch, length, q_heads, ...]."""
        if length > 1:
            rows = rows.unflatten(0, (batch, kv_heads, length)).transpose(1, 2)
        return rows.reshape(batch, length, q_heads, -1)

    if sinks is None or lse is None:
        return in_order(out)
    # One more logit takes its share of every probability.
    return (in_order(out) * (in_order(lse) - sinks.float()[:, None]).sigmoid()).to(q.dtype)
