"""How kernels are launched on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastinfer.ops._library import ops
from fastinfer.ops._setting import changed


@contextmanager
def no_dependent_launches() -> Iterator[None]:
    """Start each kernel that is launched in the ``with`` block only once the kernel before it in its stream has ended.

    Otherwise a kernel of this library may start earlier and wait, see :func:`fastinfer.ops.constant_weights`. It then
    takes room that a kernel in another stream may need. The results are the same. The setting applies to the calling
    thread. On the CPU it changes nothing.

    Raises:
        RuntimeError: the block is traced into a single graph (``torch.export``, ``torch.compile(fullgraph=True)``).
    """
    with changed("no_dependent_launches", ops.set_dependent_launches.default, False):
        yield
