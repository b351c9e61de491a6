"""The committed bounds: a line for each kernel, architecture and option."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine_code.bounds import Bound

PATH = Path(__file__).with_name("bounds.json")
TOLERANCE = 0.02

Key = tuple[str, str, str]  # kernel, architecture, option
Bounds = dict[Key, dict[str, Bound]]  # and GPU


@dataclass
class Changes:
    """Differences between bounds and the committed ones."""

    problems: list[str]
    notes: list[str]


def compare(bounds: Bounds, committed: Bounds, archs: set[str]) -> Changes:
    """Compare the bounds of a build for some architectures."""
    changes = Changes([], [])
    for key in sorted(bounds.keys() - committed.keys()):
        changes.problems.append(f"{describe(key)} has no committed bound")
    for key in sorted(committed.keys() - bounds.keys()):
        if key[1] in archs:
            changes.problems.append(f"{describe(key)} has a committed bound, but was not found")
    for key in sorted(bounds.keys() & committed.keys()):
        for gpu, bound in bounds[key].items():
            before = committed[key].get(gpu)
            if before is None:
                changes.problems.append(f"{describe(key)} has no committed bound on {gpu}")
            elif bound.share < before.share * (1 - TOLERANCE):
                changes.problems.append(
                    f"{describe(key)}: the bound on {gpu} fell from {before.share:.3f} to {bound.share:.3f} "
                    f"({bound.binds} binds)"
                )
            elif bound.share > before.share * (1 + TOLERANCE):
                changes.notes.append(
                    f"{describe(key)}: the bound on {gpu} rose from {before.share:.3f} to {bound.share:.3f}"
                )
    return changes


def describe(key: Key) -> str:
    kernel, arch, mode = key
    return f"{kernel} (sm_{arch}{', ' + mode if mode else ''})"


def read_bounds(path: Path = PATH) -> Bounds:
    bounds: Bounds = {}
    for entry in json.loads(path.read_text()):
        key = entry["kernel"], entry["arch"].removeprefix("sm_"), entry["mode"]
        bounds[key] = {gpu: Bound(**bound) for gpu, bound in entry["bounds"].items()}
    return bounds


def write_bounds(bounds: Bounds, path: Path = PATH) -> None:
    lines = ",\n".join(json.dumps(entry) for entry in _entries(bounds))
    path.write_text(f"[\n{lines}\n]\n")


def _entries(bounds: Bounds) -> Iterator[dict[str, Any]]:
    for kernel, arch, mode in sorted(bounds):
        on_gpus = {gpu: _rounded(bound) for gpu, bound in bounds[kernel, arch, mode].items()}
        yield {"kernel": kernel, "arch": f"sm_{arch}", "mode": mode, "bounds": on_gpus}


def _rounded(bound: Bound) -> dict[str, Any]:
    tflops = {} if bound.tflops is None else {"tflops": round(bound.tflops, 1)}
    return {"share": round(bound.share, 4), "binds": bound.binds, **tflops}
