"""Errors as HTTP answers: OpenAI's error object, and Anthropic's under ``/v1/messages``."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from fastinfer.errors import MAX_MESSAGE_CHARS, FastinferError, QueueFullError, UnavailableError

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
# Seconds after which a refused request may succeed. A full queue moves with every finished request.
RETRY_FULL_S = 1
RETRY_LOADING_S = 5


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

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """Return the error object."""
        kinds = _TYPES.get(self.status, _TYPES[500 if self.status >= 500 else 400])
        if anthropic:
            return {"type": "error", "error": {"type": kinds[1], "message": self.message}}
        param = None if self.param is None else self.param[:MAX_MESSAGE_CHARS]
        return {"error": {"message": self.message, "type": kinds[0], "param": param, "code": self.code}}


def unavailable(message: str, retry_after: int, code: str) -> APIError:
    """Return the error of a request that may succeed later."""
    return APIError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def as_api_error(error: BaseException, fields: Collection[str] = ()) -> APIError:
    """Return the answer to an error of the library.

    Args:
        error: any error. Messages of errors that are not the client's fault are logged, not sent: they may have paths.
        fields: names of the request's fields. A message of the library begins with the name of the field it is about.
    """
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFullError):
        return unavailable(str(error), RETRY_FULL_S, "queue_full")
    if isinstance(error, UnavailableError):
        return unavailable(str(error), RETRY_LOADING_S, "unavailable")
    if isinstance(error, FastinferError):
        message = str(error)
        word = message.replace("[", " ").replace(":", " ").split(" ", 1)[0]
        return APIError(400, message, param=word if word in fields else None)
    LOG.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to handle this request; its log has the details")


class JSON(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        data: bytes = orjson.dumps(content)
        return data


def error_response(error: APIError, scope: Scope) -> Response:
    """Return the answer in the form that the path's clients expect."""
    is_anthropic = "/v1/messages" in scope["path"]
    return JSON(error.body(anthropic=is_anthropic), error.status, error.headers)
