"""Batch-invariant results: a token's result does not depend on the rest of the batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastinfer.ops._library import ops
from fastinfer.ops._setting import changed


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Make GPU results independent of the rest of the batch inside the ``with`` block.

    A token's result then depends, to the last bit, only on the token and on the positions that it attends to. It does
    not depend on the number of tokens, the token's place among them, the other sequences, or the chunks of a prompt:

    - Products always have a tile of 32 tokens, do not split sums among multiprocessors, and normalise in a separate
      kernel.
    - :func:`paged_attention_plan` (and :func:`paged_attention` without a plan) does not split the positions of a
      sequence.

    This costs speed, most of it with little work: one sequence that decodes over a long context keeps only as many
    multiprocessors busy as it has KV heads. On the CPU it changes nothing, because results there are always
    batch-invariant.

    The setting applies to the calling thread, and to everything that a ``torch.cuda.CUDAGraph`` captures inside the
    block. Call compiled functions inside the block; a block inside a compiled function breaks the graph.

    Raises:
        RuntimeError: the block is traced into a single graph (``torch.export``, ``torch.compile(fullgraph=True)``).

    Source: fixed tiles and splits, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.

    >>> import torch, fastinfer.ops as ops
    >>> x, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with ops.batch_invariant():
    ...     alone, together = ops.gemm(x[7:8], weight), ops.gemm(x, weight)
    >>> torch.equal(alone, together[7:8])
    True
    """
    with changed("batch_invariant", ops.set_batch_invariant.default, True):
        yield
