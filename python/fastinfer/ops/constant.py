"""Weights that no kernel writes, which products on a GPU may therefore read early."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastinfer.ops._library import ops
from fastinfer.ops._setting import changed


@contextmanager
def constant_weights() -> Iterator[None]:
    """Promise for each operator in the ``with`` block: the kernel launched just before did not write its weights.

    A kernel of this library may start on a GPU while the kernel before it in the stream still runs. It waits for that
    kernel before it reads anything, because even a weight may be the result of the kernel before. With this promise,
    products (:func:`gemm`, :func:`int4_gemm`, :func:`int8_gemm`, :func:`lut_gemm`, :func:`w8a8_gemm`) and RMSNorms
    read weights, scales, look-up tables and norm weights before they wait, and only then their input. The results are
    the same; if the promise is not kept, they are undefined. Products of experts wait first in any case.

    Only the very last kernel that was launched on the stream before the product matters: when a product starts, all
    kernels before that one have ended. A weight that a kernel has written may thus be used once any other operator was
    called in between. The last kernel may be one of any library: a weight that torch has just computed is not constant.

    The setting applies to the calling thread, and to everything that a ``torch.cuda.CUDAGraph`` captures inside the
    block. Call compiled functions inside the block; a block inside a compiled function breaks the graph. On the CPU it
    changes nothing.

    Raises:
        RuntimeError: the block is traced into a single graph (``torch.export``, ``torch.compile(fullgraph=True)``).

    Source: programmatic dependent launch,
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization.

    >>> import torch, fastinfer.ops as ops
    >>> x, weight = torch.randn(2, 64), torch.randn(32, 64)
    >>> with ops.constant_weights():
    ...     early = ops.gemm(x, weight)
    >>> torch.equal(early, ops.gemm(x, weight))
    True
    """
    with changed("constant_weights", ops.set_constant_weights.default, True):
        yield
