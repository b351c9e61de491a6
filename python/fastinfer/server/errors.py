"""Errors as HTTP answers: OpenAI's error object, and Anthropic's under ``/v1/messages``."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from fastinfer.errors import (
    MAX_MESSAGE_CHARS,
    FastinferError,
    PromptTooLongError,
    QueueFullError,
    UnavailableError,
)
from fastinfer.server.json_bytes import dumps
from fastinfer.server.record import record

LOG = logging.getLogger("fastinfer.server")

# Names of the kinds of error in OpenAI's objects and in Anthropic's.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    431: ("invalid_request_error", "request_too_large"),
    500: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
# The code of an error whose object has no place for it, as Anthropic's.
CODE_HEADER = "X-Error-Code"
# Seconds after which a refused request may succeed. A full queue moves with every finished request.
RETRY_FULL_S = 1
RETRY_LOADING_S = 5
# Codes of requests that end because of the server, whatever they ask for: it shuts down, or its engine is lost.
ABORTED = "aborted"
ENGINE_DEAD = "engine_dead"

_NUMBER = re.compile(r"\[\d+\]")
_NO_LETTER = re.compile(r"\W")


class APIError(Exception):
    """An error that ends a request with an answer.

    Args:
        status: HTTP status.
        message: one line for the client, cut at 1,000 characters.
        param: name of the request's field that is wrong.
        code: name of the error for programs, such as ``"model_not_found"``.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # The class of the library's own errors makes a message one printable line of bounded length.
        self.message = str(FastinferError(message))
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def name(self) -> str:
        """Name of the error for logs: its code, or the kind of its status."""
        return self.code or _kinds(self.status)[0]

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """Return the error object."""
        kinds = _kinds(self.status)
        if anthropic:
            return {"type": "error", "error": {"type": kinds[1], "message": self.message}}
        param = None if self.param is None else self.param[:MAX_MESSAGE_CHARS]
        return {"error": {"message": self.message, "type": kinds[0], "param": param, "code": self.code}}


def _kinds(status: int) -> tuple[str, str]:
    return _TYPES.get(status, _TYPES[500 if status >= 500 else 400])


def unavailable(message: str, retry_after: int, code: str) -> APIError:
    """Return the error of a request that may succeed later."""
    return APIError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def response_not_found(id: str) -> APIError:
    """Return the error of a request about an earlier response; none are kept."""
    return APIError(404, f"response {id!r} does not exist: responses are not kept", code="response_not_found")


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> APIError:
    """Return the answer to an error of a route or of the library, in the words of the client.

    Args:
        error: any error. Messages of errors that are not the client's fault are logged, not sent: they may have paths.
        names: the request's names of fields, see :meth:`~fastinfer.server.protocol.base.RequestModel.field_names`. A
            message of the library begins with the name of the field it is about.
    """
    names = names or {}
    if isinstance(error, APIError):
        return _renamed(error, names)
    if isinstance(error, QueueFullError):
        return unavailable(str(error), RETRY_FULL_S, "queue_full")
    if isinstance(error, UnavailableError):
        return unavailable(str(error), RETRY_LOADING_S, "unavailable")
    if isinstance(error, FastinferError):
        message, code = str(error), None
        word = _NO_LETTER.split(message, maxsplit=1)[0]
        param = names.get(word)
        if param is not None:
            message = param + message.removeprefix(word)
        if isinstance(error, PromptTooLongError):  # with the words and the code by which clients recognise this
            message = f"This model's maximum context length is {error.max_model_len} tokens: {message}"
            code = "context_length_exceeded"
        return APIError(400, message, param=param, code=code)
    LOG.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to handle this request; its log has the details")


def _renamed(error: APIError, names: Mapping[str, str]) -> APIError:
    """Give an error the request's name of the field; ``[]`` in names stands for any number."""
    old = error.param or ""
    new = names.get(_NUMBER.sub("[]", old), old)
    if new != old:
        for number in _NUMBER.findall(old):
            new = new.replace("[]", number, 1)
        error.param = new
        if error.message.startswith(old):
            error.message = new + error.message.removeprefix(old)
    return error


class JSON(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def error_response(error: APIError, scope: Scope) -> Response:
    """Return the answer in the form that the path's clients expect."""
    record().error = error.name
    is_anthropic = "/v1/messages" in scope["path"]
    code = {CODE_HEADER: error.code} if is_anthropic and error.code is not None else {}
    return JSON(error.body(anthropic=is_anthropic), error.status, {**error.headers, **code})
