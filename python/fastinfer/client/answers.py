"""Contents of answers: errors, names of models, and chunks of a stream."""

import json
from typing import Any

from fastinfer.errors import RequestError, ServerError

DONE = b"[DONE]"
# The request is wrong rather than the server, so the same request would fail again.
REQUEST_STATUS = (400, 413, 422)


def check_status(status: int, body: bytes) -> None:
    """Raise the error that an answer reports unless its status is 200.

    Raises:
        RequestError: the server refuses the request as it is.
        ServerError: anything else.
    """
    if status == 200:
        return
    error = RequestError if status in REQUEST_STATUS else ServerError
    raise error(f"the server answered {status}: {_error_text(body)}")


def parse_chunk(data: bytes) -> dict[str, Any]:
    """Parse an event of a stream.

    Raises:
        ServerError: the event reports an error, or is no JSON object.
    """
    chunk = parse_object(data)
    if chunk.get("error") is not None:
        raise ServerError(f"the server's stream failed: {_error_text(data)}")
    return chunk


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ServerError: it is none.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"expected a JSON object from the server, got {data[:80]!r}")
    return value


def model_names(body: bytes) -> list[str]:
    """Return the names in an answer of ``/models``.

    Raises:
        ServerError: there are none.
    """
    models = parse_object(body).get("data")
    found = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    names = [name for name in found if isinstance(name, str)]
    if not names:
        raise ServerError("expected the server to list a model under /models, got none")
    return names


def _error_text(body: bytes) -> str:
    """Return the message of an error. Servers disagree on where it is; without any, it is the body itself."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value if isinstance(value, str) else body.decode(errors="replace").strip() or "no message"
