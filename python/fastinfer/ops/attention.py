"""Attention over a paged KV cache, and the store into it.

One operator serves decode, prefill, chunked prefill, speculation and prefix hits: the queries of each sequence are its
last positions, and attend causally to everything cached before and including them. Paging: Kwon et al., 2023,
https://arxiv.org/abs/2309.06180; online softmax: Dao et al., 2022, https://arxiv.org/abs/2205.14135.
"""

from torch import Tensor

from fastinfer.ops._library import ops


def store_kv_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the tokens' keys and values into their slots of the paged cache, in place.

    Args:
        k, v: [tokens, kv_heads, head_dim]; fp32, bf16 or fp16; may be strided views whose last two dimensions are
            contiguous (slices of a fused QKV projection).
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim]; fp32, bf16 or fp16, not necessarily that of
            ``k``: values are rounded to nearest even.
        slot_mapping: [tokens] int64; ``block * block_size + offset``. A slot of -1 is skipped; any other slot outside
            the cache raises.

    Devices: CPU.
    """
    ops.store_kv_cache.default(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries over a paged cache.

    Query i (of n) of a sequence with ``seq_lens`` = s stands at position p = s - n + i and sees positions
    max(0, p - window + 1) .. p. Query head h reads KV head ``h // (q_heads // kv_heads)``.

    Args:
        q: [tokens, q_heads, head_dim]; fp32, bf16 or fp16; may be a strided view whose last two dimensions are
            contiguous.
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim]; fp32, bf16 or fp16.
        block_table: [seqs, max_blocks] int32; entries past a sequence's length are never read.
        seq_lens: [seqs] int32; cached length of each sequence, this step's tokens included.
        query_start: [seqs + 1] int32; cumulative query counts, from 0 to ``tokens``.
        scale: factor of the logits; ``head_dim ** -0.5`` by default.
        window: sliding-window length in positions, 0 for none.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        sinks: [q_heads] fp32, one more logit per head that takes probability and has no value.
        lse: [tokens, q_heads] fp32, written in place: natural logarithm of the sum of exponentials, sink included.

    Returns:
        [tokens, q_heads, head_dim], dtype of ``q``. Computed in fp32.

    Devices: CPU.
    """
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5  # an empty head is refused below
    return ops.paged_attention.default(
        q, k_cache, v_cache, block_table, seq_lens, query_start, scale, window, softcap, sinks, lse
    )
