"""Decoding with and without n-gram speculation, for answers that copy much of their prompt and for others.

Speculation does not change the text, which is checked, so both do the same work up to the answer's natural end. Each
answer is decoded alone, and all answers of a kind together; with and without speculation take turns after a warm-up.
For single answers the time to the first token is left out.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.prompts import COPY_HEAVY, OTHERS
from fastinfer.benchmarks.replay import Job, longest_sequence, replay
from fastinfer.benchmarks.report import Goal, median_ratio
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

KINDS = {"copy-heavy": COPY_HEAVY, "others": OTHERS}
NEW_TOKENS = 160


@dataclass(frozen=True)
class Case:
    """Results of one prompt alone, or of all prompts of a kind at once.

    Attributes:
        kind: kind of the prompts.
        name: name of the case.
        num_tokens: number of generated tokens in a repeat.
        plain_s, speculative_s: seconds of each repeat without and with speculation.
        num_drafted, num_accepted: numbers of drafted and accepted tokens in all repeats.
    """

    kind: str
    name: str
    num_tokens: int
    plain_s: list[float]
    speculative_s: list[float]
    num_drafted: int
    num_accepted: int

    @property
    def gain(self) -> float:
        return median_ratio(self.plain_s, self.speculative_s)


@dataclass(frozen=True)
class Speculation:
    """Results of all cases: ``alone`` has one per prompt, ``at_once`` one per kind."""

    num_speculative_tokens: int
    alone: list[Case]
    at_once: list[Case]

    def rows(self) -> list[list[str]]:
        rows = [["prompts", "tokens", "tokens/s without", "with speculation", "times", "drafts accepted"]]
        for case in [*self.alone, *self.at_once]:
            row = [f"{case.kind}, {case.name}", str(case.num_tokens)]
            row += [f"{case.num_tokens / statistics.median(s):.1f}" for s in (case.plain_s, case.speculative_s)]
            accepted = f"{case.num_accepted / case.num_drafted:.0%}" if case.num_drafted else "-"
            rows.append([*row, f"{case.gain:.2f}", f"{accepted} of {case.num_drafted}"])
        return rows

    def goals(self) -> list[Goal]:
        copies = statistics.median(case.gain for case in self.alone if case.kind == "copy-heavy")
        others = min(case.gain for case in self.alone if case.kind == "others")
        return [
            Goal("decode speed with speculation, copy-heavy, median", copies, at_least=1.3),
            Goal("decode speed with speculation, others, worst", others, at_least=0.95),
        ]


def measure(
    subject: Subject,
    num_speculative_tokens: int,
    repeats: int,
    progress: Progress = silent,
    *,
    new_tokens: int = NEW_TOKENS,
    prompts_of: dict[str, Sequence[list[int]]] | None = None,
) -> Speculation:
    """Measure all cases.

    Args:
        subject: the model under test.
        num_speculative_tokens: largest number of drafted tokens per step.
        repeats: number of measured runs of each case.
        progress: function that is called before each run.
        new_tokens: largest number of generated tokens.
        prompts_of: token ids of the prompts by kind; by default those of :data:`KINDS`.
    """
    jobs_of = make_jobs(subject, new_tokens, prompts_of)
    options: dict[str, Any] = {
        "max_num_seqs": max(map(len, jobs_of.values())),
        "max_model_len": longest_sequence(itertools.chain(*jobs_of.values())),
        "enable_prefix_caching": False,
    }
    plain = subject.make_engine(**options)
    speculative = subject.make_engine(num_speculative_tokens=num_speculative_tokens, **options)
    alone, at_once = [], []
    for kind, jobs in jobs_of.items():
        for index, job in enumerate(jobs):
            name = f"prompt {index + 1} alone"
            alone.append(_compare(plain, speculative, kind, name, [job], repeats, progress))
        at_once.append(_compare(plain, speculative, kind, f"{len(jobs)} at once", jobs, repeats, progress))
    return Speculation(num_speculative_tokens, alone, at_once)


def make_jobs(
    subject: Subject, new_tokens: int = NEW_TOKENS, prompts_of: dict[str, Sequence[list[int]]] | None = None
) -> dict[str, list[Job]]:
    """Create the requests by kind; the arguments are those of :func:`measure`."""
    if prompts_of is None:
        prompts_of = {kind: [subject.chat_prompt(message) for message in texts] for kind, texts in KINDS.items()}
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    return {kind: [Job(prompt, params) for prompt in prompts] for kind, prompts in prompts_of.items()}


def _compare(
    plain: Engine, speculative: Engine, kind: str, name: str, jobs: list[Job], repeats: int, progress: Progress
) -> Case:
    seconds: dict[Engine, list[float]] = {plain: [], speculative: []}
    before = speculative.stats()
    for repeat in range(1 + repeats):
        progress(f"{kind}, {name}{'' if repeat else ': warm-up'}")
        runs = {engine: replay(engine, jobs) for engine in seconds}
        texts = [[timeline.token_ids for timeline in run.timelines] for run in runs.values()]
        if texts[0] != texts[1]:
            raise RequestError(f"{kind}, {name}: expected the same tokens with and without speculation, got others")
        if min(len(text) for text in texts[0]) < 2:
            raise RequestError(f"{kind}, {name}: expected an answer of at least 2 tokens, got one of 1")
        if repeat:
            for engine, run in runs.items():
                seconds[engine].append(run.timelines[0].decode_s if len(jobs) == 1 else run.seconds)
        else:
            before = speculative.stats()
    after = speculative.stats()
    return Case(
        kind=kind,
        name=name,
        # The time of a single answer excludes its first token.
        num_tokens=len(texts[0][0]) - 1 if len(jobs) == 1 else sum(map(len, texts[0])),
        plain_s=seconds[plain],
        speculative_s=seconds[speculative],
        num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )
