"""Replay of timed requests on an engine, recording when their tokens arrive."""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastinfer.benchmarks.batching import Batching, Continuous
from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams

POLL_S = 0.001  # how often a policy that waits for more jobs is asked again


@dataclass(frozen=True)
class Job:
    """A request.

    Attributes:
        prompt_token_ids: tokens of the prompt, by slot if it has a layout.
        params: parameters of the request.
        arrival_s: arrival time, in seconds after the start of the replay.
        layout: layout of a prompt of modules; ``None`` for other prompts.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    layout: PromptLayout | None = None


def longest_sequence(jobs: Iterable[Job]) -> int:
    """Return the number of tokens of the longest sequence, prompt and new tokens."""
    return max(len(job.prompt_token_ids) + (job.params.max_tokens or 0) for job in jobs)


@dataclass
class Timeline:
    """Arrival times of a job's tokens.

    Attributes:
        job: the request.
        moments: time of each output with new tokens, in seconds after the start.
        counts: total number of tokens at each of these times.
        token_ids: all generated tokens.
        finish_reason: see :class:`fastinfer.CompletionOutput`.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
    """

    job: Job
    moments: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0

    def add(self, moment: float, output: RequestOutput) -> None:
        completion = output.outputs[0]
        if len(completion.token_ids) > len(self.token_ids):
            self.moments.append(moment)
            self.counts.append(len(completion.token_ids))
        self.token_ids = completion.token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = completion.finish_reason
        if output.finished:
            self._check(completion.stop_reason)

    @property
    def first_token_s(self) -> float:
        """Seconds from the job's arrival to its first token, including the time in the queue."""
        return self.moments[0] - self.job.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between successive outputs, for which a reader of the stream waits."""
        return [after - before for before, after in itertools.pairwise(self.moments)]

    @property
    def decode_s(self) -> float:
        """Seconds from the first output to the last one."""
        return self.moments[-1] - self.moments[0]

    def _check(self, stop_reason: object) -> None:
        """Raise RequestError if the job failed or has fewer tokens than requested."""
        wanted, params = self.job.params.max_tokens, self.job.params
        may_be_short = not params.ignore_eos and self.finish_reason == "stop"
        if self.finish_reason == "error" or (len(self.token_ids) != wanted and not may_be_short):
            reason = stop_reason if self.finish_reason == "error" else "the context is too short"
            raise RequestError(
                f"expected {wanted} new tokens after {len(self.job.prompt_token_ids)} prompt tokens, "
                f"got {len(self.token_ids)} ({reason})"
            )


@dataclass(frozen=True)
class Window:
    """Part of a replay in which every request decodes: its duration, tokens, and outputs with new tokens."""

    seconds: float
    num_tokens: int
    num_outputs: int


@dataclass(frozen=True)
class Replay:
    """Result of running jobs; ``seconds`` lasts from the first job's arrival to the last job's end."""

    seconds: float
    timelines: list[Timeline]

    @property
    def num_tokens(self) -> int:
        return sum(len(timeline.token_ids) for timeline in self.timelines)

    @property
    def num_outputs(self) -> int:
        """Number of outputs with new tokens; a grammar or speculation may add several tokens in one output."""
        return sum(len(timeline.moments) for timeline in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole run, including prefill."""
        return self.num_tokens / self.seconds

    @property
    def first_token_s(self) -> list[float]:
        return [timeline.first_token_s for timeline in self.timelines]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for timeline in self.timelines for gap in timeline.gaps_s]

    def decode_window(self) -> Window | None:
        """Return the time from the first token of the last request to start, until the first request ends.

        The result is ``None`` if the first request ends before the last one has a token.
        """
        start = max(timeline.moments[0] for timeline in self.timelines)
        end = min(timeline.moments[-1] for timeline in self.timelines)
        if end <= start:
            return None
        num_tokens = num_outputs = 0
        for timeline in self.timelines:
            steps = list(zip(timeline.moments, timeline.counts, strict=True))
            counts = [count for moment, count in steps if moment <= end]
            num_before = sum(moment <= start for moment, _ in steps)
            num_tokens += counts[-1] - counts[num_before - 1]
            num_outputs += len(counts) - num_before
        return Window(end - start, num_tokens, num_outputs)


class Recorder:
    """Steps an engine and records when tokens arrive, in seconds after the recorder's creation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timelines: dict[str, Timeline] = {}
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def add(self, job: Job) -> Timeline:
        timeline = Timeline(job)
        request = self._engine.validate(job.prompt_token_ids, job.params, layout=job.layout)
        self._timelines[self._engine.add_request(request, job.params)] = timeline
        return timeline

    def step(self) -> float:
        """Run an engine step and return the time when it ended."""
        outputs = self._engine.step()
        moment = self.now()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            self._timelines[output.request_id].add(moment, output)
        return moment


def replay(engine: Engine, jobs: Iterable[Job], batching: Batching | None = None) -> Replay:
    """Run jobs to their ends.

    Args:
        engine: engine without requests.
        jobs: the jobs.
        batching: policy that decides when the engine gets a job that has arrived; at once by default.

    Raises:
        RequestError: a job can never be served, has failed, or has fewer tokens than requested.
    """
    jobs = list(jobs)
    batching = batching or Continuous()
    pending = deque(sorted(range(len(jobs)), key=lambda index: jobs[index].arrival_s))
    waiting: list[int] = []
    recorder = Recorder(engine)
    timelines: dict[int, Timeline] = {}
    moment = 0.0
    while pending or waiting or engine.has_unfinished:
        while pending and jobs[pending[0]].arrival_s <= recorder.now():
            waiting.append(pending.popleft())
        if waiting:
            lengths = [len(jobs[index].prompt_token_ids) for index in waiting]
            waited_s = recorder.now() - jobs[waiting[0]].arrival_s
            count = batching.num_ready(lengths, waited_s, not engine.has_unfinished)
            for index in waiting[:count]:
                timelines[index] = recorder.add(jobs[index])
            del waiting[:count]
        if engine.has_unfinished:
            moment = recorder.step()
        elif waiting:
            time.sleep(POLL_S)
        elif pending:
            time.sleep(max(jobs[pending[0]].arrival_s - recorder.now(), 0.0))
    first = min(job.arrival_s for job in jobs)
    return Replay(moment - first, [timelines[index] for index in range(len(jobs))])
