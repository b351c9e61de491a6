"""Comparison of continuous, static and dynamic batching on one trace of mixed lengths.

Lengths are log-uniform: as in real traffic, many are short and few are long. End-of-sequence is ignored and the prefix
cache is off, so that each policy does the same work. Each policy has one warm-up; then the policies take turns.
"""

import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

from fastinfer.benchmarks import batching
from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.replay import Job, Replay, longest_sequence, replay
from fastinfer.benchmarks.report import PERCENTILES, Goal, median_ratio, percentile
from fastinfer.benchmarks.subject import Subject
from fastinfer.sampling_params import SamplingParams

PROMPT_TOKENS = (16, 128)
NEW_TOKENS = (8, 512)


@dataclass(frozen=True)
class Policy:
    """Results of one policy: tokens/s of each repeat, and percentiles in seconds over all requests and tokens."""

    name: str
    tokens_per_s: list[float]
    first_token_s: dict[int, float]
    inter_token_s: dict[int, float]
    request_s: dict[int, float]

    @classmethod
    def of(cls, name: str, replays: list[Replay]) -> "Policy":
        timelines = [timeline for run in replays for timeline in run.timelines]
        whole = [timeline.moments[-1] - timeline.job.arrival_s for timeline in timelines]
        gaps = [gap for timeline in timelines for gap in timeline.gaps_s]
        return cls(
            name=name,
            tokens_per_s=[run.tokens_per_s for run in replays],
            first_token_s={p: percentile([t.first_token_s for t in timelines], p) for p in PERCENTILES},
            inter_token_s={p: percentile(gaps, p) for p in PERCENTILES},
            request_s={p: percentile(whole, p) for p in PERCENTILES},
        )


@dataclass(frozen=True)
class Policies:
    """Results of all policies on a trace whose requests arrive at ``rate`` per second, or all at once."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    rate: float | None
    max_num_seqs: int
    policies: list[Policy]

    def rows(self) -> list[list[str]]:
        rows = [
            ["batching", "tokens/s", "times static", "first token s p50", "p99", "between ms p50", "p99", "whole s p50"]
        ]
        for policy in self.policies:
            row = [policy.name, f"{statistics.median(policy.tokens_per_s):.1f}", f"{self._gain(policy):.2f}"]
            row += [f"{policy.first_token_s[p]:.2f}" for p in (50, 99)]
            row += [f"{policy.inter_token_s[p] * 1e3:.1f}" for p in (50, 99)]
            rows.append([*row, f"{policy.request_s[50]:.2f}"])
        return rows

    def goals(self) -> list[Goal]:
        gain = self._gain(next(policy for policy in self.policies if policy.name == "continuous"))
        # At a given rate all policies may keep up; then none is faster.
        return [] if self.rate else [Goal("continuous batching's tokens/s over static", gain, at_least=1.5)]

    def _gain(self, policy: Policy) -> float:
        static = next(policy for policy in self.policies if policy.name == "static")
        return median_ratio(policy.tokens_per_s, static.tokens_per_s)


def mixed_trace(
    subject: Subject,
    num_requests: int,
    rate: float | None,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    new_tokens: tuple[int, int] = NEW_TOKENS,
) -> list[Job]:
    """Create jobs with log-uniform lengths in the two ranges.

    They arrive together, or as a Poisson process of ``rate`` per second.
    """
    rng = random.Random(0)
    jobs, arrival_s = [], 0.0
    for _ in range(num_requests):
        params = SamplingParams(temperature=0, max_tokens=_log_uniform(rng, *new_tokens), ignore_eos=True)
        jobs.append(Job(subject.random_prompt(rng, _log_uniform(rng, *prompt_tokens)), params, arrival_s))
        arrival_s += rng.expovariate(rate) if rate else 0.0
    return jobs


def measure(
    subject: Subject, jobs: list[Job], rate: float | None, max_num_seqs: int, repeats: int, progress: Progress = silent
) -> Policies:
    """Measure each policy on the jobs, which arrive at ``rate`` per second."""
    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": longest_sequence(jobs),
        "enable_prefix_caching": False,
    }
    engine = subject.make_engine(**options)
    policies = batching.policies(max_num_seqs, engine.config.max_num_batched_tokens)
    replays: dict[str, list[Replay]] = {name: [] for name in policies}
    for repeat in range(1 + repeats):
        for name, policy in policies.items():
            progress(f"{name}{'' if repeat else ': warm-up'}")
            run = replay(engine, jobs, policy)
            if repeat:
                replays[name].append(run)
    return Policies(
        num_requests=len(jobs),
        num_prompt_tokens=sum(len(job.prompt_token_ids) for job in jobs),
        num_new_tokens=sum(job.params.max_tokens or 0 for job in jobs),
        rate=rate,
        max_num_seqs=max_num_seqs,
        policies=[Policy.of(name, runs) for name, runs in replays.items()],
    )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
