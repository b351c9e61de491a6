"""What the benchmarks of single operators share.

Candidates are timed in turns (A, B, C, A, B, C, ...), so that a machine that gets slower or faster meanwhile does so
for all of them; reported are medians, and ratios to the first candidate.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fastinfer.benchmark import percentile, table, write_json

# A sample shorter than this is dominated by the clock and the interpreter's jitter, so calls are repeated to fill it.
MIN_SAMPLE_S = 2e-3
# More than the last-level cache of the machines that we know of (a 96-core server has 384 MB for all its cores).
COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one candidate, one entry per sample; bytes and operations are those of one call."""

    name: str
    samples_s: list[float]
    bytes_moved: int | None
    flops: int | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def gb_per_s(self) -> float | None:
        return None if self.bytes_moved is None else self.bytes_moved / self.median_s / 1e9

    @property
    def gflop_per_s(self) -> float | None:
        return None if self.flops is None else self.flops / self.median_s / 1e9


def compare(
    candidates: dict[str, Callable[..., object]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    repeats: int = 20,
    bytes_moved: int | None = None,
    flops: int | None = None,
) -> list[Timing]:
    """Time callables that do the same work.

    Args:
        candidates: name to callable; the first one is what the others are compared to.
        inputs: argument tuples that successive calls take in turn, whichever candidate is called. One tuple measures
            warm caches, those of :func:`cold_inputs` cold ones.
        repeats: samples per candidate.
        bytes_moved: what one call must read and write at least.
        flops: floating-point operations of one call.
    """
    turns = itertools.cycle(inputs)
    calls = {name: _calls_per_sample(run, turns) for name, run in candidates.items()}  # this is the warm-up too
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            samples[name].append(_sample(run, turns, calls[name]) / calls[name])
    return [Timing(name, samples_s, bytes_moved, flops) for name, samples_s in samples.items()]


def cold_inputs(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Copies of the arguments that together exceed every cache, so that each call finds its own evicted."""
    first = make()
    size = sum(value.nbytes for value in first if isinstance(value, torch.Tensor))
    return [first, *(make() for _ in range(COLD_BYTES // size))]


def rows(label: str, timings: Sequence[Timing]) -> list[list[str]]:
    """Table rows of one comparison; :data:`HEAD` is their head."""
    base = timings[0].median_s
    return [
        [
            label,
            timing.name,
            f"{timing.median_s * 1e6:.1f}",
            f"{percentile(timing.samples_s, 95) * 1e6:.1f}",
            f"{timing.median_s / base:.2f}",
            "" if timing.gb_per_s is None else f"{timing.gb_per_s:.1f}",
            "" if timing.gflop_per_s is None else f"{timing.gflop_per_s:.1f}",
        ]
        for timing in timings
    ]


HEAD = ["case", "candidate", "median us", "p95 us", "x first", "GB/s", "GFLOP/s"]


def main(operator: str, run: Callable[[int], dict[str, list[Timing]]]) -> None:
    """The command line of a benchmark: run it, print its table, write ``--out``/``<operator>.json``.

    Args:
        operator: its base name.
        run: takes the number of repeats, returns the timings of each case by its label.
    """
    parser = argparse.ArgumentParser(description=f"Benchmark of {operator}.")
    parser.add_argument("--repeats", type=int, default=20, help="samples per candidate; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args()
    cases = run(args.repeats)
    print(table([HEAD, *(row for label, timings in cases.items() for row in rows(label, timings))]))
    if args.out is not None:
        measured = {label: [asdict(timing) for timing in timings] for label, timings in cases.items()}
        print(write_json(args.out / f"{operator}.json", {"operator": operator, "cases": measured}))


def _calls_per_sample(run: Callable[..., object], inputs: Iterator[tuple[Any, ...]]) -> int:
    """Double the calls until they fill a sample."""
    calls = 1
    while _sample(run, inputs, calls) < MIN_SAMPLE_S:
        calls *= 2
    return calls


def _sample(run: Callable[..., object], inputs: Iterator[tuple[Any, ...]], calls: int) -> float:
    """Seconds for this many calls, work on a GPU finished."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run(*next(inputs))
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
