"""Which cases of the tests run: a few that cover the values of the parameters, instead of every combination.

Faults depend on one value or on two together more often than on three (Kuhn et al., "Software fault interactions and
implications for software testing", 2004). So cases are chosen until they have

* on the CPU, each pair of two parameters' values;
* on emulated kernels, which are up to fifty times slower, each value;
* under a sanitizer, each value; if two of them run, one half each. Tests that only repeat the kernels of others are
  left out.

``FASTINFER_CASES=all`` runs every case, and the tests that are marked as exhaustive. Tests that try one thing at many
places have their ``share`` of these.
"""

import os
import zlib
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

from support.sanitizers import SANITIZERS

T = TypeVar("T")

RUNS_ALL = os.environ.get("FASTINFER_CASES") == "all"


def chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return those of the collected cases that run in this process.

    FASTINFER_SANITIZER names the sanitizer, and FASTINFER_EMULATION_PART, "1/4", is the part of the cases that this
    process runs.
    """
    part, parts = map(int, os.environ.get("FASTINFER_EMULATION_PART", "1/1").split("/"))
    selected = items if RUNS_ALL else without_repetition(items)
    return {item for item in selected if number_of(item) % parts == part - 1}


def without_repetition(items: list[pytest.Item]) -> list[pytest.Item]:
    sanitizer = os.environ.get("FASTINFER_SANITIZER")
    left_out = {"exhaustive", "repeats"} if sanitizer else {"exhaustive"}
    half = SANITIZERS.index(sanitizer) if sanitizer and len(SANITIZERS) > 1 else None
    tests: dict[tuple[str, frozenset[str]], list[pytest.Item]] = {}  # cases by test and kind of emulation
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not left_out & marks:
            key = item.nodeid.partition("[")[0], frozenset(marks & {"emulated", "avx512"})
            tests.setdefault(key, []).append(item)
    selected = []
    for (_, emulation), cases in tests.items():
        selected += covering(cases, 1 if emulation or sanitizer else 2, half)
    return selected


def share(places: Sequence[T], every: int) -> Sequence[T]:
    """Return every nth of them, or all with FASTINFER_CASES=all."""
    return places if RUNS_ALL else places[::every]


def name_of(item: pytest.Item) -> str:
    test, bracket, values = item.nodeid.partition("[")  # values may have slashes
    return test.rpartition("/")[2] + bracket + values  # the same whatever folder the file is in


def number_of(item: pytest.Item) -> int:
    return zlib.crc32(name_of(item).encode())


def values_of(case: pytest.Item) -> list[Hashable]:
    """Return the values of its parameters; of those that one ``parametrize`` gives together, their tuple."""
    parameters = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    values: list[Hashable] = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values.append((*names, *(id(parameters.pop(name)) for name in names if name in parameters)))
    return values + [(name, id(value)) for name, value in parameters.items()]


def covering(cases: list[pytest.Item], strength: int, half: int | None = None) -> list[pytest.Item]:
    """Return the first of a test's cases, and others that have all combinations of ``strength`` values among them.

    With ``half``, 0 or 1, half of the combinations only.
    """
    numbers: dict[tuple[Hashable, ...], int] = {}
    found = []  # the numbers of the combinations, by case
    for case in cases:
        values = values_of(case)
        together = combinations(values, min(strength, len(values)))
        found.append({numbers.setdefault(combination, len(numbers)) for combination in together})
    missing = {number for number in numbers.values() if half is None or number % 2 == half}
    selected = []
    for i in sorted(range(len(cases)), key=lambda i: (i > 0, number_of(cases[i]))):
        if i == 0 or found[i] & missing:
            selected.append(cases[i])
            missing -= found[i]
    return selected
