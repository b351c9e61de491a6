"""JSON under a schema: validity of the answers, and cost compared with free text.

Two workloads run with and without the schema in turns, with the same number of tokens for each request:

- Long strings, in which every token is drawn, so that the difference is the cost of the masks. Only the time while all
  requests decode is counted.
- Requests over twenty schemas, whose punctuation and property names are forced and need no step of their own. Seconds
  per token are what the user waits; seconds per draw are the cost of a step. Prefill is included.

The package jsonschema, which is independent of the grammars, validates the answers.
"""

import importlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.replay import Job, Replay, Timeline, longest_sequence, replay
from fastinfer.benchmarks.report import Goal, median_ratio
from fastinfer.benchmarks.schemas import SCHEMAS
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

MAX_TOKENS = 512  # of an answer; more than any of the schemas allows
STREAMS = 16
STRING_TOKENS = 96
# The minimum length cannot be reached with STRING_TOKENS, so the string never ends by itself.
LONG_STRING = {"type": "string", "minLength": 4000}


@dataclass(frozen=True)
class Cost:
    """Cost of the same number of tokens with and without a schema: draws (steps of a request), seconds per repeat."""

    name: str
    num_tokens: int
    draws_with: int
    draws_without: int
    with_s: list[float]
    without_s: list[float]

    @property
    def per_token(self) -> float:
        """Time with the schema over time without."""
        return median_ratio(self.with_s, self.without_s)

    @property
    def per_draw(self) -> float:
        return self.per_token * self.draws_without / self.draws_with

    def row(self) -> list[str]:
        with_s, without_s = statistics.median(self.with_s), statistics.median(self.without_s)
        row = [self.name, str(self.num_tokens), str(self.draws_with)]
        row += [f"{self.num_tokens / seconds:.1f}" for seconds in (without_s, with_s)]
        row += [f"{without_s / self.draws_without * 1e3:.3f}", f"{with_s / self.draws_with * 1e3:.3f}"]
        return [*row, f"{self.per_token - 1:+.1%}", f"{self.per_draw - 1:+.1%}"]


@dataclass(frozen=True)
class Structured:
    """Costs of both workloads, and numbers of answers under schemas that are complete and that are valid."""

    costs: list[Cost]
    num_requests: int
    num_schemas: int
    num_complete: int
    num_valid: int
    invalid: list[str]

    def rows(self) -> list[list[str]]:
        head = ["workload", "tokens", "draws", "tokens/s without", "with", "ms a draw without", "with"]
        return [[*head, "time a token", "time a draw"], *(cost.row() for cost in self.costs)]

    def goals(self) -> list[Goal]:
        goals = [
            Goal(f"decode time a token with a schema over without, {cost.name}", cost.per_token, at_most=1.05)
            for cost in self.costs
        ]
        share = self.num_valid / self.num_requests
        return [*goals, Goal(f"share of {self.num_requests} JSON answers that validate", share, at_least=1.0)]


def measure(
    subject: Subject,
    num_requests: int,
    repeats: int,
    progress: Progress = silent,
    *,
    streams: int = STREAMS,
    string_tokens: int = STRING_TOKENS,
) -> Structured:
    """Measure both workloads and validate the answers."""
    answers = answer_jobs(subject, num_requests)
    longest = longest_sequence(answers) + max(string_tokens - MAX_TOKENS, 0)
    engine = subject.make_engine(max_num_seqs=streams, max_model_len=longest, enable_prefix_caching=False)
    costs = []
    for count in sorted({1, streams}):
        progress(f"strings, {count} at once")
        costs.append(_string_cost(subject, engine, count, string_tokens, repeats, progress))
    cost, invalid, num_complete = _answer_cost(engine, answers, repeats, progress)
    return Structured(
        costs=[*costs, cost],
        num_requests=num_requests,
        num_schemas=min(num_requests, len(SCHEMAS)),
        num_complete=num_complete,
        num_valid=num_requests - len(invalid),
        invalid=invalid,
    )


def check_installed() -> None:
    """Raise RequestError if a required package is missing."""
    for name in ("jsonschema", "llguidance"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise RequestError(f"the section json needs the package {name}: pip install 'fastinfer[bench]'") from None


def find_invalid(timelines: Sequence[Timeline], texts: Sequence[str]) -> list[str]:
    """Return one line for each answer that does not satisfy its schema or was cut off."""
    import jsonschema

    invalid = []
    for timeline, text in zip(timelines, texts, strict=True):
        structured = timeline.job.params.structured_outputs
        assert structured is not None
        schema = json.loads(str(structured.json))
        try:
            if timeline.finish_reason != "stop":
                raise ValueError(f"ended by {timeline.finish_reason}")
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            invalid.append(f"{text!r}: {str(error).partition(chr(10))[0]}")
    return invalid


def answer_jobs(subject: Subject, num_requests: int) -> list[Job]:
    """Create requests that cycle through the schemas, with seeds that make their answers differ."""
    jobs = []
    for index in range(num_requests):
        name, schema = list(SCHEMAS.items())[index % len(SCHEMAS)]
        prompt = subject.chat_prompt(f"Describe {name} of your own invention as JSON.")
        structured = StructuredOutputsParams(json=schema)
        jobs.append(
            Job(
                prompt,
                SamplingParams(temperature=0.8, seed=index, max_tokens=MAX_TOKENS, structured_outputs=structured),
            )
        )
    return jobs


def _without_schema(job: Job, num_tokens: int) -> Job:
    """Return the same job without a schema and with ``num_tokens`` tokens."""
    return Job(
        job.prompt_token_ids, replace(job.params, structured_outputs=None, max_tokens=num_tokens, ignore_eos=True)
    )


def _string_cost(
    subject: Subject, engine: Engine, count: int, num_tokens: int, repeats: int, progress: Progress
) -> Cost:
    structured = StructuredOutputsParams(json=LONG_STRING)
    params = SamplingParams(temperature=0.8, max_tokens=num_tokens, structured_outputs=structured)
    prompt = subject.chat_prompt("Tell me a long story as a JSON string.")
    jobs = [Job(prompt, replace(params, seed=seed)) for seed in range(count)]
    unconstrained = [_without_schema(job, num_tokens) for job in jobs]
    name = f"strings, {count} at once"
    rates: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(1 + repeats):
        for with_schema in rates:
            progress(f"{name}{'' if repeat else ': warm-up'}")
            window = replay(engine, jobs if with_schema else unconstrained).decode_window()
            if window is None or window.num_tokens != window.num_outputs:
                raise RequestError(f"{name}: expected every token to be drawn while all decode, got others")
            if repeat:
                rates[with_schema].append(window.seconds / window.num_tokens)
    # Requests start one after the other, so windows differ by a few tokens: scale them to the same number.
    total = count * num_tokens
    seconds = {with_schema: [s * total for s in samples] for with_schema, samples in rates.items()}
    return Cost(name, total, total, total, seconds[True], seconds[False])


def _answer_cost(engine: Engine, jobs: list[Job], repeats: int, progress: Progress) -> tuple[Cost, list[str], int]:
    """Return the cost of the answers, the invalid ones, and the number of complete ones."""
    name = f"{len(jobs)} answers"
    progress(f"{name}: warm-up")  # each grammar is compiled here
    replay(engine, jobs[: len(SCHEMAS)])
    with_runs: list[Replay] = []
    without_runs: list[Replay] = []
    for _ in range(repeats):
        progress(f"{name} with a schema")
        with_runs.append(replay(engine, jobs))
        progress(f"{name} without")
        lengths = [len(timeline.token_ids) for timeline in with_runs[-1].timelines]
        without_runs.append(replay(engine, [_without_schema(job, n) for job, n in zip(jobs, lengths, strict=True)]))
    # The seeds are fixed, so every repeat gives the same answers.
    timelines = with_runs[-1].timelines
    texts = [engine.tokenizer.decode(timeline.token_ids) for timeline in timelines]
    cost = Cost(
        name=name,
        num_tokens=with_runs[-1].num_tokens,
        draws_with=with_runs[-1].num_outputs,
        draws_without=without_runs[-1].num_outputs,
        with_s=[run.seconds for run in with_runs],
        without_s=[run.seconds for run in without_runs],
    )
    num_complete = sum(timeline.finish_reason == "stop" for timeline in timelines)
    return cost, find_invalid(timelines, texts), num_complete
