"""Authentication by API keys, which are kept as hashes only."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fastinfer.server.errors import APIError, error_response

# Probes have no key, and the page, which asks for one, has no secrets. Every other path needs a key if there is any.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})


class Authentication:
    """Middleware that refuses requests without a valid key, before their bodies are read.

    The key comes as ``Authorization: Bearer KEY`` or as ``X-Api-Key: KEY``. The scope of an accepted request says
    whether it has an administrator's key (``is_admin``), and which tenant it belongs to (``tenant``): a name that is
    derived from the key, or "" without authentication.

    Args:
        app: the application behind.
        api_keys: keys of ordinary requests; empty for a server that is open to all.
        admin_keys: keys that open the administrative routes too.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        self._app = app
        self._api_keys = [_digest(key) for key in api_keys]
        self._admin_keys = [_digest(key) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        digest = _digest(_key(Headers(scope=scope)))
        scope["is_admin"] = _is_among(digest, self._admin_keys)
        is_known = _is_among(digest, self._api_keys) or scope["is_admin"]
        scope["tenant"] = digest.hex()[:16] if is_known else ""
        if self._api_keys and not is_known and _path(scope) not in OPEN_PATHS:
            error = APIError(
                401,
                "this server needs an API key, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def require_admin(request: Request) -> None:
    """Let only administrators pass; a dependency of the administrative routes.

    Raises:
        APIError: the request has no administrator's key, or the server has none.
    """
    if not request.scope.get("is_admin"):
        raise APIError(403, "this route needs an administrator's key (--admin-key)", code="admin_key_required")


def tenant_of(request: Request) -> str:
    """Return the name of the tenant that a request belongs to, "" without authentication."""
    tenant: str = request.scope.get("tenant", "")
    return tenant


def _key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return str(key.strip() if kind.lower() == "bearer" and key else headers.get("x-api-key", ""))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_among(digest: bytes, known: list[bytes]) -> bool:
    """Compare with every key, so that the time does not tell which one is similar."""
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def _path(scope: Scope) -> str:
    """Return the path that is routed, without the prefix of a proxy."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
