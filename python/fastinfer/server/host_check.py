"""Check of the ``Host`` header, for servers that only this machine should reach and that need no key."""

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastinfer.server.config import HttpConfig
from fastinfer.server.errors import APIError, error_response


class HostCheck:
    """Middleware that refuses requests whose ``Host`` is a public domain name.

    The owner of a web page can make its name point to 127.0.0.1 after the page has been loaded (DNS rebinding). For a
    browser the server here is then a part of that site, whose scripts may read its answers. Such requests carry the
    site's name as their host. An address, a name without a dot and ``localhost`` cannot be such a name.

    Args:
        app: the application behind.
        allowed_hosts: further names that are good, such as that of a proxy in front.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str]) -> None:
        self._app = app
        self._allowed_hosts = frozenset(map(_name, allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for value in Headers(scope=scope).getlist("host"):
                name = _name(value)
                if not (_is_local(name) or name in self._allowed_hosts):
                    error = APIError(
                        403,
                        f"Host: expected an address, localhost or a name given by --allowed-host, got {name!r}; a "
                        "server without an API key that listens on this machine alone answers to no other name",
                        code="host_not_allowed",
                    )
                    await error_response(error, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def needs_host_check(config: HttpConfig) -> bool:
    """Return whether a server listens on this machine alone and needs no key."""
    return not config.api_keys and config.uds is None and _is_loopback(config.host)


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on ``host``."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # listening on it fails, too
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    mapped = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return all(address.is_loopback for address in mapped)


def _name(value: str) -> str:
    """Return the name in a ``Host`` header, without the port and in lower case."""
    name, _, port = value.strip().lower().rpartition(":")
    return (name if name and port.isdigit() else value.strip().lower()).rstrip(".")


def _is_local(name: str) -> bool:
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
