"""Results that do not depend on a token's company."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastinfer.ops._library import ops


def _set(value: bool) -> bool:
    # A trace would call the operator for real, and note its result as a constant. (The decorator that keeps functions
    # out of traces imports the compiler, which takes two seconds.)
    if torch.compiler.is_compiling():
        raise RuntimeError("batch_invariant cannot be compiled: call compiled functions within it")
    return bool(ops.set_batch_invariant.default(value))


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within it a token's results on a GPU depend on nothing but the token and what it attends to, to the last bit.

    However many tokens there are, wherever it stands among them, whichever sequences are beside its own, and however a
    prompt is cut into chunks: products have one tile, of 32 tokens, cut no sum for the sake of more multiprocessors,
    and normalise in a kernel of their own; :func:`paged_attention_plan` (and :func:`paged_attention` without a plan)
    cuts no sequence's positions. This costs speed, most where there is little to do: one sequence that decodes over a
    long context keeps as many multiprocessors busy as it has KV heads. On the CPU it changes nothing: there it is
    always so. Not yet run on a GPU.

    It holds for the calling thread, and for what a ``torch.cuda.CUDAGraph`` captures within it. Compiled functions are
    to be called within it; inside them it breaks the graph.

    Raises:
        RuntimeError: in a trace of one graph, as of ``torch.export`` or ``torch.compile(fullgraph=True)``.

    Source: fixed tiles and splits, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.

    >>> import torch, fastinfer.ops as ops
    >>> x, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with ops.batch_invariant():
    ...     alone, together = ops.gemm(x[7:8], weight), ops.gemm(x, weight)
    >>> torch.equal(alone, together[7:8])
    True
    """
    before = _set(True)
    try:
        yield
    finally:
        _set(before)
