"""A request on its way through the router."""

import asyncio
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from fastinfer.client.endpoint import Headers
from fastinfer.server.protocol.base import LARGE_BODY_BYTES, read_body
from fastinfer.server.record import record
from fastinfer.server.router.prompts import Prompt, find_prompt, join_headers, parse_object, with_seed

# Headers about one connection, RFC 9110 section 7.6.1, and those that the other side writes itself.
CONNECTION_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
    | {b"host", b"content-length", b"expect", b"x-request-id", b"date"}
)
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
TIMEOUT_HEADER = b"x-request-timeout"
SAMPLED_HEADER = b"x-cache-sampled"
# Interfaces whose streams another replica can continue.
CHUNKED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})


@dataclass(frozen=True)
class RoutedRequest:
    """A request as replicas get it.

    Attributes:
        method: its method.
        path: its path, with the query.
        body: its body.
        prompt: its prompt, for the index of prefixes.
        is_continuable: whether its answer is a stream that another replica can continue.
        begin: monotonic time at which it came, in seconds.
    """

    method: str
    path: str
    body: bytes
    prompt: Prompt
    is_continuable: bool
    _headers: tuple[tuple[bytes, bytes], ...]
    begin: float = field(default_factory=time.monotonic)

    @classmethod
    async def read(cls, request: Request, timeout: float) -> "RoutedRequest":
        """Read a request.

        Args:
            request: the request.
            timeout: seconds in which the body must have arrived.

        Raises:
            APIError: the body is late.
            ClientGoneError: the client has gone before all of the body was there.
        """
        body = await read_body(request, timeout)
        sent = [(name, value) for name, value in request.scope["headers"] if name not in CONNECTION_HEADERS]
        headers = [*sent, (b"x-request-id", record().request_id.encode())]
        # Every route of the router is a constant path, and this is it without the prefix of a proxy.
        path: str = request.scope["route"].path
        query = request.scope["query_string"].decode("latin-1")
        if len(body) > LARGE_BODY_BYTES:
            fields, prompt = await asyncio.to_thread(_parse, body, headers)
        else:
            fields, prompt = _parse(body, headers)
        is_continuable = path in CHUNKED_PATHS and fields.get("stream") is True
        if is_continuable and fields.get("seed") is None and fields.get("temperature") != 0:
            is_repeatable = any(name == SAMPLED_HEADER and value.lower() in (b"1", b"true") for name, value in headers)
            body = with_seed(body, is_repeatable=is_repeatable)
            if not is_repeatable:  # nobody will ask with this seed again
                headers = [(name, value) for name, value in headers if name != b"cache-control"]
                headers.append((b"cache-control", b"no-cache, no-store"))
        path = f"{path}?{query}" if query else path
        # A replica's answer to HEAD would have no end: its length is that of a body that does not come.
        method = "GET" if request.method == "HEAD" else request.method
        return cls(method, path, body, prompt, is_continuable, tuple(headers))

    def headers(self) -> Headers:
        """Return the headers for a replica that gets the request now; its own time limit has begun before."""
        seconds = time.monotonic() - self.begin
        return [(name, _rest_of(value, seconds) if name == TIMEOUT_HEADER else value) for name, value in self._headers]


def _parse(body: bytes, headers: Headers) -> tuple[dict[str, object], Prompt]:
    fields = parse_object(body)
    return fields, find_prompt(fields, join_headers(headers, KEY_HEADERS))


def _rest_of(limit: bytes, seconds: float) -> bytes:
    """Return what is left of a time limit; what is none is for the replica to refuse."""
    try:
        limit_s = float(limit)
    except ValueError:
        return limit
    # Not 0, which would be refused as a limit.
    return b"%.3f" % max(limit_s - seconds, 0.001) if limit_s > 0 else limit
