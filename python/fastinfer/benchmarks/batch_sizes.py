"""Throughput and latency by batch size, for requests of equal length that arrive together.

Prompts are random, end-of-sequence is ignored and the prefix cache is off, so that every run does the same work. Each
size has a complete warm-up, which records the graphs of its steps; then the sizes take turns.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.replay import Job, Replay, replay
from fastinfer.benchmarks.report import PERCENTILES, Goal, median_ratio, percentile
from fastinfer.benchmarks.subject import Subject
from fastinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class BatchSize:
    """Results of one batch size. Rates have one value per repeat; latencies cover the tokens of all repeats.

    Attributes:
        batch_size: number of requests at once.
        tokens_per_s: generated tokens divided by the whole time, including prefill.
        decode_tokens_per_s: rate while all requests decode; empty if some ended before others began to.
        first_token_s: median time to the first token.
        inter_token_s: percentile to seconds between tokens.
    """

    batch_size: int
    tokens_per_s: list[float]
    decode_tokens_per_s: list[float]
    first_token_s: float
    inter_token_s: dict[int, float]

    @classmethod
    def of(cls, batch_size: int, replays: Sequence[Replay]) -> "BatchSize":
        windows = [window for run in replays if (window := run.decode_window()) is not None]
        gaps = [gap for run in replays for gap in run.gaps_s]
        return cls(
            batch_size=batch_size,
            tokens_per_s=[run.tokens_per_s for run in replays],
            decode_tokens_per_s=[window.num_tokens / window.seconds for window in windows],
            first_token_s=statistics.median(s for run in replays for s in run.first_token_s),
            inter_token_s={p: percentile(gaps, p) for p in PERCENTILES},
        )


@dataclass(frozen=True)
class BatchSizes:
    """Results of all batch sizes, in the given order."""

    prompt_tokens: int
    new_tokens: int
    sizes: list[BatchSize]

    def rows(self) -> list[list[str]]:
        rows = [["requests at once", "tokens/s", "times", "decode tokens/s", "first token ms"]]
        rows[0] += [f"p{p} ms" for p in PERCENTILES]
        for size in self.sizes:
            decode = size.decode_tokens_per_s
            row = [str(size.batch_size), f"{statistics.median(size.tokens_per_s):.1f}", f"{self._gain(size):.2f}"]
            row.append(f"{statistics.median(decode):.1f}" if decode else "-")
            row.append(f"{size.first_token_s * 1e3:.0f}")
            rows.append([*row, *(f"{size.inter_token_s[p] * 1e3:.2f}" for p in PERCENTILES)])
        return rows

    def goals(self) -> list[Goal]:
        by_size = {size.batch_size: size for size in self.sizes}
        if not {1, 16} <= by_size.keys():
            return []
        gain = median_ratio(by_size[16].tokens_per_s, by_size[1].tokens_per_s)
        return [Goal("tokens/s of 16 at once over one at a time", gain, at_least=2.5)]

    def plot(self, path: Path, title: str) -> Path:
        from matplotlib.figure import Figure

        labels = [str(size.batch_size) for size in self.sizes]
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        figure.suptitle(f"{title}: {self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens")
        throughput, latency = figure.subplots(1, 2)
        throughput.plot(labels, [statistics.median(s.tokens_per_s) for s in self.sizes], "o-", label="prefill included")
        decode = [statistics.median(s.decode_tokens_per_s or [float("nan")]) for s in self.sizes]
        throughput.plot(labels, decode, "o-", label="while all decode")
        throughput.set_title("Generated tokens/s")
        for p in PERCENTILES:
            latency.plot(labels, [size.inter_token_s[p] * 1e3 for size in self.sizes], "o-", label=f"p{p}")
        latency.set_title("Between tokens, ms")
        for axes in (throughput, latency):
            axes.set_xlabel("requests at once")
            axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
            axes.legend()
        figure.savefig(path, dpi=120)
        return path

    def _gain(self, size: BatchSize) -> float:
        return median_ratio(size.tokens_per_s, min(self.sizes, key=lambda s: s.batch_size).tokens_per_s)


def measure(
    subject: Subject,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    progress: Progress = silent,
) -> BatchSizes:
    """Measure each batch size."""
    engine = subject.make_engine(
        max_num_seqs=max(batch_sizes), max_model_len=prompt_tokens + new_tokens, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    rng = random.Random(0)
    replays: dict[int, list[Replay]] = {size: [] for size in batch_sizes}
    for repeat in range(1 + repeats):
        for size in batch_sizes:
            progress(f"{size} requests at once{'' if repeat else ': warm-up'}")
            run = replay(engine, [Job(subject.random_prompt(rng, prompt_tokens), params) for _ in range(size)])
            if repeat:
                replays[size].append(run)
    sizes = [BatchSize.of(size, replays[size]) for size in batch_sizes]
    return BatchSizes(prompt_tokens, new_tokens, sizes)
