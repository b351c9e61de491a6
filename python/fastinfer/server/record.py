"""Facts about a request for headers, metrics, logs and traces, without texts and keys."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from fastinfer.outputs import RequestMetrics, RequestOutput
from fastinfer.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request; what it has not come to is ``None``.

    Attributes:
        method, path: of the request; the path is that of the route, which has no names that a client has made up.
        request_id: its id.
        traceparent: the caller's span, in the form of the W3C.
        start_ns: Unix time at which it came, in nanoseconds.
        seconds: time that it took.
        status: status of the answer; 499 if the client had gone before it.
        model: name of the model.
        params: parameters of generation.
        cache: what the response cache did: ``"hit"``, ``"semantic"``, ``"miss"`` or ``"bypass"``.
        num_prompt_tokens, num_tokens: tokens of its prompts and of its answers.
        finish_reasons: why its completions ended.
        times: times of its first prompt in the engine.
        error: name of the error that ended it.
    """

    method: str = ""
    path: str = ""
    request_id: str = ""
    traceparent: str = ""
    start_ns: int = field(default_factory=time.time_ns)
    seconds: float = 0.0
    status: int = 499
    model: str | None = None
    params: SamplingParams | None = None
    cache: str | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reasons: set[str] = field(default_factory=set)
    times: RequestMetrics | None = None
    error: str | None = None

    @property
    def is_replayed(self) -> bool:
        """Whether the answer comes from the cache, and the engine has not seen the request."""
        return self.cache in ("hit", "semantic")

    def add(self, output: RequestOutput, num_tokens: int) -> None:
        """Take the last output of a prompt."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_tokens += num_tokens
        self.finish_reasons |= {completion.finish_reason or "" for completion in output.outputs}
        self.times = self.times or output.metrics


_RECORD: ContextVar[RequestRecord] = ContextVar("record")


@contextlib.contextmanager
def new_record() -> Iterator[RequestRecord]:
    """Make the record of the request that the current task, and those that it starts, handle meanwhile."""
    new = RequestRecord()
    token = _RECORD.set(new)
    try:
        yield new
    finally:
        _RECORD.reset(token)


def record() -> RequestRecord:
    """Return the record of the current request; outside of one, a new one that nobody reads."""
    return _RECORD.get(None) or RequestRecord()
