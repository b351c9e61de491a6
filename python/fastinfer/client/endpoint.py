"""Address of an OpenAI-compatible server."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

from fastinfer.errors import RequestError

Headers = Sequence[tuple[bytes, bytes]]
JSON_HEADERS: Headers = ((b"Content-Type", b"application/json"),)


@dataclass(frozen=True)
class Endpoint:
    """Address of a server.

    Attributes:
        host: name or IP address.
        port: TCP port.
        is_tls: whether the connection is encrypted.
        base_path: beginning of every path, ``/v1`` as a rule.
        api_key: key sent as a bearer token; ``None`` for none.
    """

    host: str
    port: int
    is_tls: bool
    base_path: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, default_path: str = "/v1") -> "Endpoint":
        """Parse a URL. One without a path means the API under ``default_path``.

        Raises:
            RequestError: it is no URL of a server, or the key cannot be sent in a header.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as for the look-up, which refuses labels that are empty or too long
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
            raise RequestError(f"url: expected http://HOST:PORT or https://HOST/PATH, got {url!r}")
        if parts.username is not None:
            raise RequestError("url: expected no user name, got one; a key is given by itself")
        if not (parts.netloc + parts.path).isascii() or not url.isprintable() or " " in url:
            raise RequestError(f"url: expected printable ASCII characters, got {url!r}")
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise RequestError("api key: expected printable ASCII characters")
        is_tls = parts.scheme == "https"
        base_path = parts.path.rstrip("/") or default_path
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base_path, api_key)

    @property
    def authority(self) -> str:
        """Host and port as URLs and the ``Host`` header have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    @cached_property  # making one reads all certificate authorities, which may take 0.2 s
    def ssl_context(self) -> ssl.SSLContext | None:
        """Context that verifies the server's certificate; ``None`` without TLS."""
        return ssl.create_default_context() if self.is_tls else None

    def request_head(self, method: str, path: str, num_bytes: int, headers: Headers = JSON_HEADERS) -> bytes:
        """Return the request line and the headers of a request with a body of ``num_bytes``."""
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1".encode(),
            f"Host: {self.authority}".encode(),
            f"Content-Length: {num_bytes}".encode(),
            *(b"%b: %b" % header for header in headers),
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}".encode())
        return b"\r\n".join([*lines, b"", b""])
