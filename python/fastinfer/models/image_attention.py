"""Attention of an image's tokens to those behind them, which causal attention leaves out."""

import torch
from torch import Tensor

from fastinfer import ops


def attend_to_later(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: tuple[slice, ...], scale: float
) -> None:
    """Complete the causal attention of images whose tokens see each other in both directions.

    Each image is computed by itself and in fp32, in plain torch, so that the result does not depend on the batch.

    Args:
        q: [tokens, q_heads, head_dim] normalised and rotated queries of a step.
        k, v: [tokens, kv_heads, head_dim] normalised and rotated keys, and values.
        out: [tokens, q_heads, head_dim] causal attention, changed in place.
        lse: [tokens, q_heads] fp32; natural logarithms of its sums of exponentials.
        spans: rows of each image.
        scale: factor of the logits.
    """
    for span in spans:
        queries = q[span].float().unflatten(1, (k.shape[1], -1))
        keys, values = k[span].float(), v[span].float()
        logits = torch.einsum("nhgd,mhd->nhgm", queries, keys) * scale
        is_later = torch.ones(len(keys), len(keys), dtype=torch.bool, device=q.device).triu(1)
        logits.masked_fill_(~is_later[:, None, None], -torch.inf)
        later = torch.einsum("nhgm,mhd->nhgd", logits.softmax(-1).nan_to_num(0.0), values)  # the last one sees none
        merged, _ = ops.merge_attention_states(
            out[span], lse[span], later.flatten(1, 2).to(out.dtype), logits.logsumexp(-1).flatten(1)
        )
        out[span] = merged
