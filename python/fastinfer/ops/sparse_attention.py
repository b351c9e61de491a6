"""Sparse attention: tokens read only those pages of the KV cache that hold nearly all of their attention.

A page is a block of the cache. :func:`store_key_codes` keeps each key in four bits an element, from which its logit can
be estimated for any query. :func:`select_pages` weighs the pages by these estimates and takes the heaviest, until they
have a given share of the attention, and :func:`fastinfer.ops.paged_attention` attends to them as if they were the whole
sequence. With all pages the result is bitwise that of dense attention. If the values have codes, too
(:func:`store_value_codes`), :func:`select_pages` also attends to the other pages, by codes alone, and
:func:`fastinfer.ops.merge_attention_states` adds that to the result.

Models that were trained with sparse attention choose single tokens by an indexer of their own, for prompts too:
:func:`select_tokens`.
"""

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


def store_key_codes(codes: Tensor, k_cache: Tensor, k_scale: Tensor | None, slot_mapping: Tensor) -> None:
    """Write the codes of keys that have just been written, in place.

    Call it after :func:`fastinfer.ops.store_kv_cache` with the same slots. A key is multiplied by the Hadamard matrix
    of the largest power of two that divides its size, run by run, so that no channel is much larger than the others.
    Each element of the product becomes the nearest of 16 levels -7.5, -6.5 .. 7.5, times the key's scale, which puts
    the largest element at the outermost level.

    Args:
        codes: [num_blocks, kv_heads, head_dim / 8 + 1, block_size] int32, written in place: eight codes a word, and
            then the bits of the scale in fp32. The codes of the channels 8 w + b and 8 w + 4 + b are the lower and the
            upper half of byte b of word w. The scale of a key with an infinity or a NaN is NaN.
        k_cache, k_scale: keys of the cache, as in :func:`fastinfer.ops.store_kv_cache`, with a head_dim that is a
            multiple of 8, on CUDA of at most 512.
        slot_mapping: [tokens] int64; ``block * block_size + offset``. A token with slot -1 is skipped.

    Raises:
        RuntimeError: a shape, dtype, device or on CUDA the ``head_dim`` does not fit; scales are missing, or passed
            for a cache that has none; on the CPU also a slot outside the cache, which CUDA skips.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: keys in four bits as estimates: Twilight: Lin et al., 2025, https://arxiv.org/abs/2502.02770; the rotation:
    QuaRot: Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.

    >>> import torch, fastinfer.ops as ops
    >>> k_cache = torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]).view(1, 1, 1, 8)  # one block of one slot
    >>> codes = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    >>> ops.store_key_codes(codes, k_cache, None, torch.tensor([0]))
    >>> codes.view(torch.uint8)[0, 0, 0], codes.view(torch.float32)[0, 0, 1]  # eight times code 15
    (tensor([255, 255, 255, 255], dtype=torch.uint8), tensor([1.0667]))
    """
    inference_only("store_key_codes", "codes k_cache", codes, k_cache)
    ops.store_key_codes.default(codes, k_cache, k_scale, slot_mapping)


def store_value_codes(codes: Tensor, v_cache: Tensor, v_scale: Tensor | None, slot_mapping: Tensor) -> None:
    """Write the codes of the values of blocks that have just been filled, in place.

    Call it after :func:`fastinfer.ops.store_kv_cache` with the same slots. A block is filled when its last slot is
    written; then all of its values are read from the cache. Values are rotated and rounded as keys are by
    :func:`store_key_codes`.

    Args:
        codes: [num_blocks, kv_heads, head_dim / 8 + 1, block_size] int32, written in place, with a block_size that is a
            multiple of 8. The words of a block and head are [block_size / 8, head_dim] with eight codes each, and then
            the [block_size] bits of the scales in fp32. Byte b of word [g, c] has the codes of the tokens 8 g + b and,
            in its upper half, 8 g + 4 + b, in channel c.
        v_cache, v_scale: values of the cache, as in :func:`fastinfer.ops.store_kv_cache`, with a head_dim that is a
            multiple of 8.
        slot_mapping: [tokens] int64; ``block * block_size + offset``. A token with slot -1 is skipped.

    Raises:
        RuntimeError: a shape, dtype, device or slot does not fit; scales are missing, or passed for a cache that has
            none.

    Devices: CPU.

    Source: the rotation: QuaRot: Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.

    >>> import torch, fastinfer.ops as ops
    >>> v_cache = torch.arange(8.0).view(1, 8, 1, 1) * torch.eye(8)[0]  # one block of eight slots
    >>> codes = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    >>> ops.store_value_codes(codes, v_cache, None, torch.tensor([7]))
    >>> codes.view(torch.float32)[0, 0, 1]
    tensor([0.0000, 0.1333, 0.2667, 0.4000, 0.5333, 0.6667, 0.8000, 0.9333])
    """
    inference_only("store_value_codes", "codes v_cache", codes, v_cache)
    ops.store_value_codes.default(codes, v_cache, v_scale, slot_mapping)


def select_pages(
    q: Tensor,
    codes: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    block_size: int,
    share: float,
    num_dense_pages: int = 0,
    scale: float | None = None,
    row_start: Tensor | None = None,
    value_codes: Tensor | None = None,
    rest: Tensor | None = None,
    rest_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the pages that each row reads, for each KV head; a row is a token, or some tokens that read the same.

    These are the first page, the last two pages of what the row sees, and of the others those with the largest weights,
    until all have ``share`` of the sum of the weights. Each query head's logits are estimated: the query is rotated as
    the keys are and rounded to eight bits, so that a logit is a product of integers times both scales. The softmax of
    the estimates over all tokens that the query sees, summed over a page's tokens and over the query heads that share
    the KV head, is the page's weight. Of a row with several tokens the last one is looked at and every fourth before
    it, and their weights are added. The pages stay in their order. Of equal weights all are taken, or none. A page with
    an estimate that is NaN or infinite is taken, and its weight counts for nothing.

    The results are a block table and lengths for :func:`fastinfer.ops.paged_attention`, in which each row is a sequence
    of its own: its ``query_start`` is ``row_start``, or 0, 1, 2, ... A row's pages do not depend on the other rows.

    Args:
        q: [tokens, q_heads, head_dim]; fp32, bf16 or fp16, with a head_dim that is a multiple of 8, on CUDA of at
            most 512; may be a strided view whose last two dimensions are contiguous.
        codes: [num_blocks, kv_heads, head_dim / 8 + 1, block_size] int32, see :func:`store_key_codes`.
        block_table: [seqs, max_blocks] int32; entries past a sequence's length are never read.
        seq_lens: [seqs] int32; cached length of each sequence, including all of its queries.
        query_start: [seqs + 1] int32; cumulative query counts. There may be more queries than ``tokens``, which are
            then the first of them; on CUDA also fewer, and the other tokens read nothing.
        block_size: tokens per page.
        share: share of the attention that the pages of a row must have, above 0; with 1 each row reads all pages.
        num_dense_pages: a row that sees no more pages reads them all.
        scale: factor of the logits; ``head_dim ** -0.5`` by default.
        row_start: [rows + 1] int32; the first token of each row, and the end of the last one. A row has tokens of one
            sequence, at most ``block_size`` of them, or none. By default each token is a row. CPU only.
        value_codes: [num_blocks, kv_heads, head_dim / 8 + 1, block_size] int32, see :func:`store_value_codes`: attend
            to the pages that are not chosen, too. Their logits are the estimates, and the probabilities, times the
            values' scales, are rounded to seven bits within a page. Pages with less than a 64th of an average
            page's attention are left out. Only without ``row_start``; CPU only, as are the next two.
        rest: [tokens, q_heads, head_dim], dtype of ``q``, written in place: the attention to these pages.
        rest_lse: [tokens, q_heads] fp32, written in place: natural logarithm of the sum of their exponentials. Where it
            is -inf, ``rest`` is undefined; see :func:`fastinfer.ops.merge_attention_states`.

    Returns:
        The pages, [rows, kv_heads, max_blocks] int32, whose entries past the length are undefined, and the number of
        positions in them, [rows, kv_heads] int32.

    Raises:
        RuntimeError: a shape, dtype, device, stride or ``head_dim`` does not fit; ``share`` is not in (0, 1], or
            ``num_dense_pages`` is negative; on CUDA ``row_start`` or ``value_codes`` is passed; on the CPU also lengths
            or rows that contradict each other, and blocks outside the cache.
        TypeError: of ``value_codes``, ``rest`` and ``rest_lse`` some are missing, or ``row_start`` is passed with them.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: pages for each query: Quest: Tang et al., 2024, https://arxiv.org/abs/2406.10774; estimates by keys in four
    bits, and as many pages as have a share of the attention: Twilight: Lin et al., 2025,
    https://arxiv.org/abs/2502.02770; rows of several tokens: after XAttention: Xu et al., 2025,
    https://arxiv.org/abs/2503.16428, whose estimates are sums over antidiagonals.

    >>> import torch, fastinfer.ops as ops
    >>> keys = torch.tensor([0.0, 1, 9, 2, 0, 0]).view(6, 1, 1, 1).expand(6, 1, 1, 8).contiguous()  # pages of one key
    >>> codes = torch.zeros(6, 1, 2, 1, dtype=torch.int32)
    >>> ops.store_key_codes(codes, keys, None, torch.arange(6))
    >>> table, lengths = torch.arange(6).int()[None], [torch.tensor(n).int() for n in ([6], [0, 1])]
    >>> pages, lens = ops.select_pages(torch.ones(1, 1, 8), codes, table, *lengths, block_size=1, share=0.9)
    >>> lens, pages[..., :4]
    (tensor([[4]], dtype=torch.int32), tensor([[[0, 2, 4, 5]]], dtype=torch.int32))
    >>> ops.paged_attention(torch.ones(1, 1, 8), keys, keys, pages, lens, lengths[1])[0, 0, :2]
    tensor([9., 9.])
    """
    inference_only("select_pages", "q codes", q, codes)
    if scale is None:
        scale = max(q.shape[-1] if q.dim() else 1, 1) ** -0.5  # empty heads and scalars are refused below
    args = (q, codes, block_table, seq_lens, query_start, block_size, share, num_dense_pages, scale)
    if value_codes is rest is rest_lse is None:
        pages, lens = ops.select_pages.default(*args, row_start)
    elif value_codes is None or rest is None or rest_lse is None:
        raise TypeError("select_pages: value_codes, rest and rest_lse must be given together")
    elif row_start is not None:
        raise TypeError("select_pages: row_start must be None with value_codes, as each token is a row")
    else:
        pages, lens = ops.select_pages.rest(*args, value_codes, rest, rest_lse)
    return pages, lens


def select_tokens(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Choose the cached tokens that each query reads: those with the ``top_k`` highest scores of an indexer.

    The score of position s for a query is the sum over the index heads h of ``weights[h] * max(q[h] @ keys[s], 0)``. A
    query that sees no more than ``top_k`` positions reads them all, and nothing is scored. The tokens stay in their
    order; of equal scores the earlier position wins, and a NaN comes before all numbers.

    The results are a block table and lengths for :func:`fastinfer.ops.paged_attention`, for which a block has one slot
    and each query is a sequence of its own: pass the caches as [num_blocks * block_size, 1, kv_heads, head_dim], and
    0, 1, 2, ... as ``query_start``. A query's tokens do not depend on the other queries, and with all tokens chosen the
    result on the CPU is bitwise that of dense attention.

    Args:
        q: [tokens, heads, head_dim]; fp32, bf16 or fp16, on CUDA bf16 or fp16 with a head_dim that is a multiple of 8
            and at most 128; may be a strided view whose last two dimensions are contiguous.
        weights: [tokens, heads], dtype of ``q``; may be a strided view whose last dimension is contiguous.
        keys: [num_blocks, block_size, 1, head_dim]; fp32, bf16 or fp16, on CUDA the dtype of ``q``; one key of each
            cached token for all heads.
        block_table: [seqs, max_blocks] int32; entries past a sequence's length are never read.
        seq_lens: [seqs] int32; cached length of each sequence, including all of its queries.
        query_start: [seqs + 1] int32; cumulative query counts. There may be more queries than ``tokens``, which are
            then the first of them; on CUDA also fewer, and the other tokens read nothing.
        top_k: number of tokens that a query reads at most.

    Returns:
        The slots ``block * block_size + offset`` of the chosen tokens, [tokens, min(top_k, max_blocks * block_size)]
        int32, whose entries past the length are undefined, and how many these are, [tokens] int32.

    Raises:
        RuntimeError: a shape, dtype, device, stride or ``head_dim`` does not fit; ``top_k`` is not positive; on CUDA
            the keys are not aligned to 16 bytes, or the heads do not fit into shared memory; on the CPU also lengths
            that contradict each other, and blocks outside the cache.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1, without the constant factor of all scores.

    >>> import torch, fastinfer.ops as ops
    >>> keys = torch.tensor([3.0, -9.0, 1.0, 2.0]).view(4, 1, 1, 1)  # four blocks of one token
    >>> table, lengths = torch.tensor([[2, 0, 1, 3]]).int(), [torch.tensor(n).int() for n in ([4], [0, 1])]
    >>> ops.select_tokens(torch.ones(1, 1, 1), torch.ones(1, 1), keys, table, *lengths, top_k=2)
    (tensor([[0, 3]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    >>> ops.select_tokens(torch.ones(1, 1, 1), -torch.ones(1, 1), keys, table, *lengths, top_k=2)
    (tensor([[2, 1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    inference_only("select_tokens", "q weights", q, weights)
    inference_only("select_tokens", "keys", keys)
    slots, lens = ops.select_tokens.default(q, weights, keys, block_table, seq_lens, query_start, top_k)
    return slots, lens
