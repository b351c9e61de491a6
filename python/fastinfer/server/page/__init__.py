"""The chat page: one file without dependencies, and the headers under which it is served."""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """The page as it is sent.

    Attributes:
        body: the file.
        headers: HTTP headers, with a Content-Security-Policy that lets only the page's own script and styles run, and
            that lets it talk to its own server only.
    """

    body: bytes
    headers: dict[str, str]


@lru_cache(maxsize=1)
def load_page() -> Page:
    """Read the page and compute its headers."""
    text = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "img-src": "data:",  # the icon, and images that the reader attaches
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
        "Cache-Control": "no-cache",
    }
    return Page(text.encode(), headers)
