"""Traces: when requests arrive, and how long they are.

A trace file has one JSON object per line::

    {"arrival_s": 0.25, "prompt_tokens": 300, "output_tokens": 64}
    {"arrival_s": 0.75, "prompt_tokens": 900, "output_tokens": 20, "prefix": "manual", "prefix_tokens": 800}

Requests with the same ``prefix`` begin with the same ``prefix_tokens`` tokens, or with as many as the shorter one has.
All other tokens are those of the request alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from fastinfer.errors import RequestError
from fastinfer.utils.checks import INT32_MAX, check_float, check_int, check_text, show, show_path
from fastinfer.utils.regular_file import read_regular

MAX_SECONDS = 1e9
FIELDS = ("arrival_s", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        arrival_s: time of its arrival in seconds after the start.
        prompt_tokens: length of the prompt in tokens.
        output_tokens: number of tokens to generate.
        prefix: name of the text that the prompt begins with; ``None`` if it shares none.
        prefix_tokens: length of this text in tokens, at most that of the prompt.

    Raises:
        RequestError: a value has another type or is out of range.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        check_float("arrival_s", self.arrival_s, 0.0, MAX_SECONDS)
        check_int("prompt_tokens", self.prompt_tokens, 1, INT32_MAX)
        check_int("output_tokens", self.output_tokens, 1, INT32_MAX)
        if self.prefix is None:
            if self.prefix_tokens != 0:
                raise RequestError(f"prefix_tokens must come with prefix, got {show(self.prefix_tokens)} without one")
            return
        check_text("prefix", self.prefix)
        check_int("prefix_tokens", self.prefix_tokens, 1, self.prompt_tokens)


def check_length(request: TraceRequest, max_model_len: int) -> None:
    """Check that an engine can ever serve a request.

    Raises:
        RequestError: the request is longer than the longest sequence.
    """
    if request.prompt_tokens + request.output_tokens > max_model_len:
        raise RequestError(
            f"prompt and output must have at most max_model_len={max_model_len} tokens together, got "
            f"{request.prompt_tokens} and {request.output_tokens}"
        )


def read_trace(path: Path, max_model_len: int) -> list[TraceRequest]:
    """Read a trace file; empty lines are skipped.

    Args:
        path: the file.
        max_model_len: longest sequence in tokens.

    Raises:
        RequestError: the file cannot be read, or a line is no request, or one that is too long; the message has its
            number.
    """
    try:
        lines = read_regular(path).splitlines()
    except OSError as problem:
        raise RequestError(f"{show_path(path)}: {problem.strerror}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(line))
                check_length(requests[-1], max_model_len)
            except RequestError as error:
                raise RequestError(f"{show_path(path)}, line {number}: {error}") from None
    if not requests:
        raise RequestError(f"{show_path(path)}: expected requests, one JSON object per line, got none")
    return requests


def _request(line: bytes) -> TraceRequest:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"expected a JSON object, got {show(line.strip())} ({error})") from None
    if not isinstance(values, dict):
        raise RequestError(f"expected a JSON object, got {show(values)}")
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        raise RequestError(f"expected {', '.join(FIELDS)}, got {show(unknown[0])}")
    missing = [name for name in FIELDS[:3] if name not in values]
    if missing:
        raise RequestError(f"{missing[0]} is missing")
    return TraceRequest(**values)
