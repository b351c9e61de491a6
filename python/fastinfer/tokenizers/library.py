"""The border to the tokenizers library, whose errors are plain exceptions, or panics of Rust."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer as Backend

from fastinfer.errors import FastinferError, RequestError
from fastinfer.utils.text import one_line


@contextmanager
def as_our_error(make: Callable[[str], FastinferError]) -> Iterator[None]:
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


def encode(backend: Backend, text: str) -> list[int]:
    """Encode a user's text without the tokens around it.

    Raises:
        RequestError: the library failed, as it does if a search for a pattern is tried too often.
    """
    with as_our_error(lambda message: RequestError(f"prompt: the model's tokenizer failed on it: {message}")):
        # Unlike encode, this lets other threads run meanwhile: those of the engine and of the event loop.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids
