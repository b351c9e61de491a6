"""Summaries and files of measurements."""

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastinfer.utils.machine import machine_facts

PERCENTILES = (50, 95, 99)


def percentile(samples: Iterable[float], percent: float) -> float:
    """Return the smallest sample that at least ``percent`` % of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank) - 1, 0)]


def write_json(path: Path, measured: dict[str, Any]) -> Path:
    """Write measurements with the date (UTC) and a description of the machine; create the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": date, "machine": machine_facts(), **measured}, indent=2) + "\n")
    return path


def print_plot(plot: Callable[[], Path]) -> None:
    """Draw a plot and print its path, or a message if matplotlib is not installed."""
    try:
        print(plot())
    except ImportError:
        print("no plot: it needs matplotlib (pip install 'fastinfer[bench]')", file=sys.stderr)


@dataclass(frozen=True)
class Goal:
    """Measured figure and its required bound."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def goal_rows(goals: Iterable[Goal]) -> list[list[str]]:
    """Return the rows of a table of goals, with its head."""
    rows = [["figure", "measured", "wanted", "holds"]]
    for goal in goals:
        wanted = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
        rows.append([goal.name, f"{goal.value:.3g}", wanted, "yes" if goal.holds else "no"])
    return rows


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios of pairs.

    The two values of a pair are measured one after the other, so that load from other programs affects both.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
