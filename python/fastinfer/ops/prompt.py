"""Rows that are tokens of a prompt, which a CPU may compute with other instructions than generated tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastinfer.ops._library import ops
from fastinfer.ops._setting import changed

NO_ROW = 2**63 - 1


@contextmanager
def prompt_rows(first: int) -> Iterator[None]:
    """Tell each operator in the ``with`` block that its rows from ``first`` on are tokens of a prompt.

    On CPUs with AMX, ``gemm``, ``int4_gemm``, ``int5_gemm``, ``int6_gemm``, ``int8_gemm`` and ``lut_gemm`` compute
    these rows in bf16 tiles, and so do the grouped products the rows that read these rows of ``x``: rows (after the
    norm) and weights are rounded to bf16, whatever their dtype and ``activation_bits`` are, and summed in fp32.
    ``add_lora``, whose rows are those of the tokens from ``first`` on, also rounds the products with ``a``.
    ``w8a8_gemm`` asks for no roles: its int8 tiles have the same bits as no tiles.

    On CPUs with AMX or AVX-512 BF16, ``paged_attention``, whose rows are the tokens of ``q``, rounds queries, keys,
    values and probabilities to bf16; its sums and its softmax stay in fp32.

    Which way a row takes depends on this setting alone, never on the number of rows, so that a token's result is the
    same in any batch and in any chunk of its prompt. Elsewhere the setting changes nothing.

    The setting applies to the calling thread. Call compiled functions inside the block; a block inside a compiled
    function breaks the graph.

    Args:
        first: index of the first such row; 0 for all rows.

    Raises:
        ValueError: ``first`` is negative.
        RuntimeError: the block is traced into a single graph (``torch.export``, ``torch.compile(fullgraph=True)``).

    >>> import torch, fastinfer.ops as ops
    >>> x, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with ops.prompt_rows(1):
    ...     together = ops.gemm(x, weight)
    >>> torch.equal(together[:1], ops.gemm(x[:1], weight))
    True
    """
    if first < 0:
        raise ValueError(f"first must be at least 0, got {first}")
    with changed("prompt_rows", ops.set_first_prompt_row.default, first):
        yield


@contextmanager
def prompt_rows_of_experts(top_k: int) -> Iterator[None]:
    """Tell each operator in the ``with`` block that every row of before has become ``top_k`` rows, one of each expert.

    The rows of a prompt, if there are any, then begin at ``top_k`` times the row of :func:`prompt_rows`. It is for
    products that read the rows of experts, as the second one of a mixture of experts does.

    Args:
        top_k: number of experts per token.

    Raises:
        RuntimeError: as for :func:`prompt_rows`.

    >>> import torch, fastinfer.ops as ops
    >>> rows, weight = torch.randn(6, 64), torch.randn(32, 64)  # of three tokens, of which the last is a prompt
    >>> with ops.prompt_rows(2), ops.prompt_rows_of_experts(2):
    ...     out = ops.gemm(rows, weight)
    >>> torch.equal(out[:4], ops.gemm(rows[:4], weight))
    True
    """
    with changed("prompt_rows_of_experts", ops.set_first_prompt_row.default, NO_ROW) as first:
        if first == NO_ROW:
            yield
        else:
            with prompt_rows(first * top_k):
                yield
