"""The border to the tokenizers library, whose errors are plain exceptions, or panics of Rust."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastinfer.errors import FastinferError
from fastinfer.utils.text import one_line


@contextmanager
def library_errors(make: Callable[[str], FastinferError]) -> Iterator[None]:
    """Turn an error of the library into ours.

    A panic is a ``BaseException``, so that ``except Exception`` lets it pass and a thread or a server would end by it.
    Its class cannot be imported: every library that is written in Rust has its own. Nothing else is caught: not
    ``KeyboardInterrupt``, and not our own errors.

    Args:
        make: function from the library's message to the error that is raised.
    """
    try:
        yield
    except FastinferError:
        raise
    except Exception as error:
        raise make(one_line(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise make(one_line(error)) from None
