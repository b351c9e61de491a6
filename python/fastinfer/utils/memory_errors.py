"""Errors of exhausted memory, which each library reports in its own way."""

import contextlib
import errno
from collections.abc import Iterator

import torch

from fastinfer.errors import RequestError
from fastinfer.utils.text import one_line

# Parts of the messages of torch's allocators, of C++ and of the system, which come as RuntimeError.
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory", "bad_alloc")


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error says that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


@contextlib.contextmanager
def explained_memory_errors(needs: str, options: str) -> Iterator[None]:
    """Explain errors of exhausted memory by what needs how much of it, and by the options that change that.

    Raises:
        RequestError: memory is exhausted.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        raise RequestError(f"memory is exhausted: {needs}; change {options} ({one_line(error)})") from None
