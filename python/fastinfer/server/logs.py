"""Logs as text or as JSON: a line per request, and what the library and its dependencies report.

Lines have no prompts, no answers and no keys. They are written by a thread of their own, so that a slow or blocked
reader of the log holds up no request.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any, TextIO

import orjson

from fastinfer.server.record import RequestRecord, record

REQUESTS = logging.getLogger("fastinfer.server.requests")
# They come every few seconds and say nothing unless they fail.
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})
# Lines that wait for their reader; further ones are dropped.
MAX_WAITING_LINES = 10_000
FLUSH_S = 2.0


def log_request(request: RequestRecord) -> None:
    """Log a request that has ended, except a successful probe."""
    if not REQUESTS.isEnabledFor(logging.INFO) or (request.path in PROBES and request.status == 200):
        return
    fields = {
        "request_id": request.request_id,
        "method": request.method,
        "path": request.path,
        "status": request.status,
        "duration_s": round(request.seconds, 6),
        "model": request.model,
        "cache": request.cache,
        "error": request.error,
    }
    if request.finish_reasons:
        fields |= {
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": request.num_tokens,
            "finish_reason": ",".join(sorted(request.finish_reasons)),
        }
    given = {name: value for name, value in fields.items() if value is not None}
    REQUESTS.info("request", extra={"fields": given})


class JSONFormatter(logging.Formatter):
    """Writes an object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text: bytes = orjson.dumps(line, default=str)
        return text.decode()


class TextFormatter(logging.Formatter):
    """Writes a readable line; the fields of a request as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record.created)} {record.levelname} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


FORMATTERS = {"json": JSONFormatter, "text": TextFormatter}


@contextlib.contextmanager
def logging_to(stream: TextIO | None, form: str, level: str) -> Iterator[None]:
    """Send everything that is logged meanwhile to a stream.

    Args:
        stream: the stream; ``None`` for standard error.
        form: ``"json"`` or ``"text"``.
        level: lowest level of the library's own lines, such as ``"info"``, which has those of requests. Other packages
            log warnings.
    """
    lines: SimpleQueue[Any] = SimpleQueue()  # which a signal's handler may use at any moment
    listener = _Listener(lines, logging.StreamHandler(stream or sys.stderr))
    handler = _Handler(lines, listener)
    handler.setFormatter(FORMATTERS[form]())
    root, library = logging.getLogger(), logging.getLogger("fastinfer")
    level_before = library.level
    root.addHandler(handler)
    library.setLevel(level.upper())
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        library.setLevel(level_before)
        listener.stop()


def end_logs() -> None:
    """Write what has been logged before the process ends; what is logged later is lost."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.writer.stop()


class _Handler(QueueHandler):
    """Formats lines at once, where the request that they belong to is known, and leaves the writing to the listener."""

    def __init__(self, lines: SimpleQueue[Any], writer: "_Listener") -> None:
        super().__init__(lines)
        self.writer = writer
        self._lines = lines

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put_nowait(record)


class _Listener(QueueListener):
    def stop(self) -> None:
        """Write what there is, but do not wait forever for a reader that has stopped to read."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(FLUSH_S)


def _fields(line: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a request's line; of another line the id of the request in which it was logged, if any."""
    fields: dict[str, Any] | None = getattr(line, "fields", None)
    if fields is None:
        request_id = record().request_id
        return {"request_id": request_id} if request_id else {}
    return fields


def _time(seconds: float) -> str:
    """Return a time in UTC to the millisecond, as in RFC 3339."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
