"""Control of torch's own thread pool, and of the size of ours."""

import contextlib
from collections.abc import Iterator

import torch

from fastinfer import _C


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch with one thread inside the ``with`` block, for code of many small operations.

    The barriers of torch's threads spin: on two cores with another busy process each copy while loading a model took
    2 ms instead of 20 us, and loading took 2.0 s instead of 0.4 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def set_num_threads(count: int) -> None:
    """Compute with this number of CPU threads, in torch and in this package's kernels."""
    torch.set_num_threads(count)
    _C.set_num_threads(count)
