"""Resumable download of one file over HTTP(S) or from a ``file:`` URL."""

import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from fastinfer.hub.failures import why_unreachable

CHUNK_BYTES = 1 << 18  # 256 KiB: few reads (350 for 93 MB), and a progress bar that moves on slow lines
TIMEOUT_S = 30.0


def download(url: str, part: Path, *, progress: bool = True) -> None:
    """Fetch ``url`` into ``part``, continuing after the bytes that ``part`` already holds.

    After a cut connection the download is retried as long as each attempt gets further than the one before. If the
    server ignores ``Range`` and sends everything again, the file starts over. On failure ``part`` keeps the bytes that
    have arrived. The content is not checked here.

    Args:
        url: ``http:``, ``https:`` or ``file:``. Proxies come from the usual environment variables, certificates from
            ``PIP_CERT``, else from OpenSSL's defaults (``SSL_CERT_FILE``, ``SSL_CERT_DIR``).
        part: the file to fill, in an existing folder.
        progress: whether to show a progress bar on stderr.

    Raises:
        OSError: the server cannot be reached or refuses, the disk is full, or the connection keeps being cut.
    """
    reached = -1
    while not _fetch(url, part, progress):
        size = _size(part)
        if size <= reached:
            raise ConnectionError(f"the connection was cut after {size} bytes; run again to continue")
        reached = size


def _fetch(url: str, part: Path, progress: bool) -> bool:
    """Send one request; return True if ``part`` is now complete, False if the connection was cut."""
    from tqdm import tqdm

    start = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    tls = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        # The server has nothing after the bytes in ``part``: they are the whole file, or belong to another one.
        if error.headers.get("Content-Range", "").endswith(f"/{start}"):
            return True
        part.unlink()
        return False
    except OSError as error:
        if why := why_unreachable(error):
            host = urllib.parse.urlsplit(url).netloc
            raise ConnectionError(f"no network: {host} cannot be reached ({why})") from error
        raise

    resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
    start = start if resumed else 0
    length = response.headers.get("Content-Length")
    total = None if length is None else start + int(length)
    name = url.rsplit("/", 1)[-1]
    with (
        response,
        part.open("ab" if resumed else "wb") as file,
        tqdm(total=total, initial=start, desc=name, unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        while True:
            try:
                chunk = response.read(CHUNK_BYTES)
            except (OSError, http.client.HTTPException):
                return False
            if not chunk:
                break
            file.write(chunk)
            bar.update(len(chunk))
        return total is None or file.tell() == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
