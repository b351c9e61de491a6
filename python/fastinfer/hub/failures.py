"""Why a download failed, in one line, from the errors of several HTTP libraries."""

from collections.abc import Iterator
from urllib.error import HTTPError

from fastinfer.utils.text import first_line

# Names of classes, because the libraries differ between versions of huggingface_hub (requests, httpx).
_UNREACHABLE = {"ConnectionError", "ConnectError", "TransportError", "Timeout", "TimeoutError", "gaierror"}


def why_unreachable(error: BaseException) -> str | None:
    """Return why the server could not be reached; ``None`` if it answered, or if the error has another cause."""
    chain = list(_causes(error))
    if any(isinstance(cause, HTTPError) for cause in chain):
        return None
    for cause in reversed(chain):  # the innermost cause says most
        if class_names(cause) & _UNREACHABLE:
            return first_line(cause)
    return None


def all_class_names(error: BaseException) -> set[str]:
    """Return the names of the classes, with their bases, of an error and its causes."""
    return set().union(*map(class_names, _causes(error)))


def class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its bases."""
    return {cls.__name__ for cls in type(error).__mro__}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    cause: object = error
    while isinstance(cause, BaseException):
        yield cause
        # urllib keeps the cause as an attribute.
        cause = getattr(cause, "reason", None) or cause.__cause__ or cause.__context__
