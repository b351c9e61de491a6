"""Reads the benchmarks of an H100 in bench/results/h100, for the tables of docs/performance.md."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent.parent / "bench"
RESULTS = BENCH / "results/h100"
sys.path.insert(0, str(BENCH))

from cuda_timing import Ceilings  # noqa: E402
from harness import Timing  # noqa: E402

# Shares of the copy are of cases that move more: less is no work for a whole GPU.
LEAST_BYTES = 16 << 20
PEERS = ("torch", "SDPA", "FlashAttention", "FlashInfer", "transformers")


@dataclass(frozen=True)
class Case:
    """Timings of one case by candidate, without those that could not run, and the ceilings of that run."""

    label: str
    timings: dict[str, Timing]
    ceilings: Ceilings

    def of_copy(self, candidate: str) -> float | None:
        rate = self.timings[candidate].gb_per_s
        return None if rate is None else rate / self.ceilings.copy_gb_per_s

    def times_the_peer(self, candidate: str) -> float | None:
        """Return a candidate's speed as a multiple of the fastest peer's; ``None`` if there is no peer."""
        peers = [timing.median_s for name, timing in self.timings.items() if name.startswith(PEERS)]
        return min(peers) / self.timings[candidate].median_s if peers else None


def read_json(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def read_cases(operator: str, pattern: str = "") -> list[Case]:
    """Return the cases of an operator's benchmark whose labels begin as the pattern says.

    Raises:
        SystemExit: there is no such case, as when a benchmark has changed.
    """
    measured = read_json(operator)
    ceilings = Ceilings(**measured["ceilings"])
    cases = [
        Case(label, {timing["name"]: Timing(**timing) for timing in timings if timing["samples_s"]}, ceilings)
        for label, timings in measured["cases"].items()
        if re.match(pattern, label)
    ]
    if not cases:
        raise SystemExit(f"{RESULTS / operator}.json has no case {pattern}")
    return cases


@dataclass(frozen=True)
class Measured:
    """A candidate in the cases of a benchmark whose labels begin as a pattern says."""

    benchmark: str
    candidate: str
    cases: str

    def rates(self) -> str:
        cases = read_cases(self.benchmark, self.cases)
        rates = [case.timings[self.candidate].gflop_per_s for case in cases]
        return show_range([rate / 1e3 for rate in rates if rate is not None], 0) + " TFLOP/s"

    def shares(self) -> str:
        cases = read_cases(self.benchmark, self.cases)
        large = [case for case in cases if (case.timings[self.candidate].bytes_moved or 0) >= LEAST_BYTES]
        return show_range([share for case in large if (share := case.of_copy(self.candidate)) is not None])


def show_range(values: list[float], digits: int = 2) -> str:
    """Show the lowest and the highest value."""
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def show_us(timing: Timing) -> str:
    us = timing.median_s * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"
