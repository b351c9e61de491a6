"""Attention over a paged KV cache, and the operator that writes keys and values into the cache.

One operator serves decode, prefill, chunked prefill, speculation and prefix hits. The queries of a sequence are its
last positions; each attends causally to all cached positions up to its own.
"""

from torch import Tensor
from torch.compiler import is_compiling

from fastinfer.ops._library import inference_only, into, ops


def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of tokens into their slots of the paged cache, in place.

    Args:
        k, v: [tokens, kv_heads, head_dim]; fp32, bf16 or fp16; may be strided views whose last two dimensions are
            contiguous (slices of a fused QKV projection).
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim]; fp32, bf16 or fp16, not necessarily the dtype
            of ``k``; or int8 or float8_e4m3fn, with scales; or uint8 [num_blocks, block_size, kv_heads, head_dim / 2],
            which stands for int4: two elements per byte, the first in the lower half. Values are rounded to nearest
            even.
        slot_mapping: [tokens] int64; ``block * block_size + offset``. A token with slot -1 is skipped.
        k_scale, v_scale: scales of quantised caches, written in place; ``None`` for the other caches.

            For int8 and float8_e4m3fn: [num_blocks, block_size, kv_heads] fp32, the scale of each stored token and
            head: amax / 127 for int8, amax / 448 for e4m3. A row of zeros is stored as zeros with scale 0, a row with
            an infinity or a NaN as zeros with scale NaN.

            For int4: [num_blocks, block_size, kv_heads, groups, 2] fp16, a scale s and a minimum m for each group of
            16 elements of a key or 64 elements of a value (the last group may be smaller). Code q stands for s q + m,
            with m = min x, s = (max x - m) / 15 and q = (x - m) / s in 0..15, each computed from the rounded ones
            before it. A group of equal numbers gets codes 0. A group with an infinity, a NaN or a number beyond the
            range of fp16 gets codes 0 and NaN for s and m.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; scales are missing, or passed for a cache that has
            none; on the CPU also a slot outside the cache, which CUDA skips.

    Devices: CPU, CUDA.

    Source: the paged cache: Kwon et al., 2023, https://arxiv.org/abs/2309.06180; int4 by groups with a minimum: Sheng
    et al., 2023, https://arxiv.org/abs/2303.06865.

    >>> import torch, fastinfer.ops as ops
    >>> k, v = torch.ones(2, 1, 2), torch.full((2, 1, 2), 5.0)
    >>> k_cache, v_cache = torch.zeros(2, 4, 3, 1, 2)  # each of 4 blocks of 3 slots
    >>> ops.store_kv_cache(k, v, k_cache, v_cache, torch.tensor([10, -1]))  # the second token is padding
    >>> v_cache[3, :, 0]  # slot 10 is the second of block 3
    tensor([[0., 0.],
            [5., 5.],
            [0., 0.]])
    """
    inference_only("store_kv_cache", "k v", k, v)
    inference_only("store_kv_cache", "k_cache v_cache", k_cache, v_cache)
    ops.store_kv_cache.default(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    chunked: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of ragged queries over a paged cache.

    Query i (of n) of a sequence of length s (``seq_lens``) has the position p = s - n + i and sees all positions up to
    p, or with a window only positions max(0, p - window + 1) .. p, or with chunks only those of its own chunk,
    p - p % window .. p. Query head h reads KV head ``h // (q_heads // kv_heads)`` (GQA).

    Args:
        q: [tokens, q_heads, head_dim]; fp32, bf16 or fp16; may be a strided view whose last two dimensions are
            contiguous. On CUDA bf16 or fp16, with a head_dim of 64, 80, 96, 128, 256 or 512.
        k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim]; fp32, bf16, fp16, int8 or float8_e4m3fn (NaN is
            read as 480); or uint8 [num_blocks, block_size, kv_heads, head_dim / 2] for int4. On CUDA the dtype of
            ``q``, int8, float8_e4m3fn or uint8, aligned to 16 bytes. ``v_cache`` may be ``k_cache[..., :value_dim]``:
            each row is then a key whose first elements are the value (multi-head latent attention), and is read once;
            not with uint8. On CUDA the first 256 of 320 or 512 of 576, in the dtype of ``q``.
        block_table: [seqs, max_blocks] int32; entries past a sequence's length are never read. Or
            [seqs, kv_heads, max_blocks]: each KV head has other blocks, see :func:`fastinfer.ops.select_pages`.
        seq_lens: [seqs] int32; cached length of each sequence, including this step's tokens. Or [seqs, kv_heads] if
            each KV head has other blocks.
        query_start: [seqs + 1] int32; cumulative query counts, from 0 to ``tokens``.
        scale: factor of the logits; ``head_dim ** -0.5`` by default.
        window: sliding-window length in positions, 0 for none.
        softcap: cap of the logits, ``softcap * tanh(logits / softcap)``; 0 for none, else below 2^127. On the CPU the
            cap adds an error of at most ``3e-7 * softcap`` to a logit, so a large one costs accuracy.
        sinks: [q_heads] fp32; one more logit per head, which takes part in the softmax and has no value.
        lse: [tokens, q_heads] fp32, written in place: natural logarithm of the sum of exponentials, sink included.
        k_scale, v_scale: scales of quantised caches, as :func:`store_kv_cache` writes them. For int8 and float8_e4m3fn
            the element [b, i, h, d] is ``k_cache[b, i, h, d] * k_scale[b, i, h]``. For values in the keys, the same.
        plan: result of :func:`paged_attention_plan` for the same ``seq_lens``, ``query_start``, heads, head_dim,
            window and ``chunked``; ``None`` to plan in this call. Calls that share a plan must follow each other on one
            stream.
        chunked: whether ``window`` is the length of chunks that the text is cut into; without a window it means
            nothing.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, q_heads, head_dim], or [tokens, q_heads, value_dim], dtype of ``q``. Computed in fp32; on CUDA the
        operands of the products, including the probabilities, have the dtype of ``q``. A query that sees no position
        gives 0, with the sink as its lse, or -inf without a sink.

    On CPUs with AMX or AVX-512 BF16, tokens that :func:`fastinfer.ops.prompt_rows` declares as a prompt's are computed
    in bf16 with sums in fp32.

    On the CPU a token's result is bitwise the same in any batch. On CUDA the work is cut into equal parts for all
    multiprocessors, so the order of fp32 sums depends on the lengths in the batch, but on nothing else: a repeated call
    gives bitwise the same result. Under :func:`fastinfer.ops.batch_invariant` it depends only on the token's own
    sequence.

    Raises:
        RuntimeError: a shape, dtype, device, stride or, on CUDA, head_dim does not fit; scales are missing, or passed
            for a cache that has none; ``window`` or ``softcap`` is negative, or ``softcap`` is infinite or NaN; on the
            CPU also lengths and blocks that contradict each other or are outside the cache.

    Devices: CPU, CUDA.

    Source: the paged cache: Kwon et al., 2023, https://arxiv.org/abs/2309.06180; online softmax over tiles: Dao et al.,
    2022, https://arxiv.org/abs/2205.14135, and Dao, 2023, https://arxiv.org/abs/2307.08691; GQA: Ainslie et al., 2023,
    https://arxiv.org/abs/2305.13245; values in the keys: DeepSeek-V2, https://arxiv.org/abs/2405.04434; chunks: Llama 4
    in transformers.

    >>> import torch, fastinfer.ops as ops
    >>> q, k, v = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)  # one sequence of 5 tokens
    >>> k_cache, v_cache = torch.zeros(2, 8, 16, 2, 64)  # each of 8 blocks of 16 positions
    >>> ops.store_kv_cache(k, v, k_cache, v_cache, 3 * 16 + torch.arange(5))  # into block 3
    >>> lengths = [torch.tensor(t, dtype=torch.int32) for t in ([[3]], [5], [0, 5])]
    >>> out = ops.paged_attention(q, k_cache, v_cache, *lengths)
    >>> heads = [t.transpose(0, 1) for t in (q, k, v)]
    >>> expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    >>> torch.allclose(out, expected.transpose(0, 1), atol=1e-5)
    True
    >>> lengths[2] = torch.tensor([0, 1], dtype=torch.int32)  # decode: only the last token is a query
    >>> torch.equal(ops.paged_attention(q[4:], k_cache, v_cache, *lengths), out[4:])
    True
    """
    inference_only("paged_attention", "q lse", q, lse)
    inference_only("paged_attention", "k_cache v_cache", k_cache, v_cache)
    if scale is None:
        scale = max(q.shape[-1] if q.dim() else 1, 1) ** -0.5  # empty heads and scalars are refused below
    args = (
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start,
        scale,
        window,
        softcap,
        sinks,
        lse,
        k_scale,
        v_scale,
        plan,
        chunked,
    )
    if out is None and is_compiling():  # Inductor cannot lower an operator whose optional, mutable lse is None
        out = q.new_empty([*q.shape[:-1], v_cache.shape[-1]] if v_cache.shape[-1] < k_cache.shape[-1] else q.shape)
    if out is not None:
        return into(out, ops.paged_attention, *args)
    return ops.paged_attention.default(*args)


def paged_attention_plan(
    seq_lens: Tensor,
    query_start: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int = 0,
    chunked: bool = False,
) -> Tensor:
    """Plan how :func:`paged_attention` divides a step's work among the multiprocessors of a GPU.

    All layers of a step with the same window can share a plan. The plan is computed on the device and its size depends
    only on shapes, so it can be part of a CUDA graph. A plan made under :func:`fastinfer.ops.batch_invariant` makes the
    calls that use it batch-invariant, wherever they run; calls with a plan made outside are not batch-invariant, even
    inside that context.

    Args:
        seq_lens: [seqs] or [seqs, kv_heads] int32; cached length of each sequence, including this step's tokens.
        query_start: [seqs + 1] int32; cumulative query counts.
        q_heads, kv_heads, head_dim, window, chunked: the same as in the calls that will use the plan.

    Returns:
        int32, opaque; empty on the CPU, whose kernel needs no plan.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; ``q_heads`` is not a multiple of ``kv_heads``; ``window``
            is negative; on CUDA also a head_dim that its kernels do not support.

    Devices: CPU, CUDA.

    Source: division into equal parts: Stream-K, Osama et al., 2023, https://arxiv.org/abs/2301.03598.

    >>> import torch, fastinfer.ops as ops
    >>> seq_lens, query_start = torch.tensor([7, 9]).int(), torch.tensor([0, 1, 2]).int()
    >>> ops.paged_attention_plan(seq_lens, query_start, q_heads=4, kv_heads=2, head_dim=64)
    tensor([], dtype=torch.int32)
    """
    return ops.paged_attention_plan.default(seq_lens, query_start, q_heads, kv_heads, head_dim, window, chunked)


def merge_attention_states(
    a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Merge the attention over two disjoint sets of positions into the attention over both.

    The operation is associative, so any number of parts can be merged: a shared prefix and the rest, or chunks of a
    long context. At most one part may include the sink.

    Args:
        a, b: [tokens, heads, head_dim]; fp32, bf16 or fp16.
        a_lse, b_lse: [tokens, heads] fp32; natural logarithms of the sums of exponentials. For -inf (the query saw no
            position) the row is ignored.
        inplace: write the results into ``a`` and ``a_lse``; CPU only.

    Returns:
        The merged attention, [tokens, heads, head_dim] with the dtype of ``a``, and its lse, [tokens, heads] fp32;
        0 and -inf where both are -inf.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: online softmax: Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.

    >>> import torch, fastinfer.ops as ops
    >>> logits, values = torch.randn(1, 1, 6), torch.randn(6, 64)
    >>> def attend(part):
    ...     return logits[..., part].softmax(-1) @ values[part], logits[..., part].logsumexp(-1)
    >>> out, lse = ops.merge_attention_states(*attend(slice(0, 4)), *attend(slice(4, 6)))
    >>> torch.allclose(out, logits.softmax(-1) @ values, atol=1e-5)
    True
    """
    inference_only("merge_attention_states", "a b", a, b)
    inference_only("merge_attention_states", "a_lse b_lse", a_lse, b_lse)
    if inplace:
        ops.merge_attention_states.inplace(a, a_lse, b, b_lse)
        return a, a_lse
    return ops.merge_attention_states.default(a, a_lse, b, b_lse)
