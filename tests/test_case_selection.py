"""The choice among a test's cases: it is small, and has every combination that it promises."""

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from support import case_selection
from support.case_selection import covering

PARAMETERS: dict[str, list[Any]] = {"dtype": ["fp32", "bf16"], "size": [1, 33, 200], "m, n": [(1, 2), (3, 2), (3, 4)]}


class Case(SimpleNamespace):
    """Stand-in for a case of a test."""

    def iter_markers(self, name: str | None = None) -> list[Any]:
        return [mark for mark in self.marks if name in (None, mark.name)]


def cases(name: str = "test", *marks: str, folder: str = "tests") -> list[Any]:
    found = []
    for values in product(*PARAMETERS.values()):
        parametrize = [SimpleNamespace(name="parametrize", args=(names, ())) for names in PARAMETERS]
        params: dict[str, Any] = {}
        for names, value in zip(PARAMETERS, values, strict=True):
            params |= dict(zip(names.split(", "), value, strict=True)) if ", " in names else {names: value}
        others = [SimpleNamespace(name=mark, args=()) for mark in marks]
        nodeid = f"{folder}/{name}.py::{name}[{'-'.join(map(str, values))}]"
        found.append(Case(nodeid=nodeid, marks=parametrize + others, callspec=SimpleNamespace(params=params)))
    return found


def combinations_of(chosen: list[Any], strength: int) -> set[Any]:
    together = [
        (c.callspec.params["dtype"], c.callspec.params["size"], (c.callspec.params["m"], c.callspec.params["n"]))
        for c in chosen
    ]
    return {pair for values in together for pair in combinations(enumerate(values), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 14)])
def test_every_combination_is_there(strength: int, most: int) -> None:
    all_of_them = cases()
    chosen = covering(all_of_them, strength)
    assert chosen[0] is all_of_them[0]
    assert len(chosen) <= most
    assert combinations_of(chosen, strength) == combinations_of(all_of_them, strength)


def test_the_sanitizers_have_all_values_between_them() -> None:
    halves = [covering(cases(), 1, half) for half in (0, 1)]
    assert all(combinations_of(half, 1) != combinations_of(cases(), 1) for half in halves)
    assert combinations_of([*halves[0], *halves[1]], 1) == combinations_of(cases(), 1)


def test_a_case_that_is_asked_for_alone_runs() -> None:
    for case in cases():
        assert case_selection.without_repetition([case]) == [case]


def test_other_tests_of_the_same_name_take_no_cases_away() -> None:
    """Nor do those whose values have slashes, as paths have."""
    one, other = cases(folder="tests/a"), cases(folder="tests/b")
    assert len(case_selection.without_repetition([*one, *other])) == 2 * len(case_selection.without_repetition(one))
    tests = [Case(nodeid=f"tests/{name}.py::{name}[/v1/x]", marks=[], callspec=one[0].callspec) for name in "ab"]
    assert case_selection.without_repetition(tests) == tests  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("sanitizer", "names"), [(None, {"plain", "repeating", "emulated"}), ("address", {"plain", "emulated"})]
)
def test_what_runs(sanitizer: str | None, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if sanitizer:
        monkeypatch.setenv("FASTINFER_SANITIZER", sanitizer)
    else:
        monkeypatch.delenv("FASTINFER_SANITIZER", raising=False)
    items = [
        *cases("plain"),
        *cases("repeating", "repeats"),
        *cases("long", "exhaustive"),
        *cases("emulated", "emulated"),
    ]
    chosen = case_selection.without_repetition(items)
    count = {name: sum(f"::{name}[" in case.nodeid for case in chosen) for name in names}
    assert sum(count.values()) == len(chosen)
    assert all(count.values())
    assert (count["plain"] > count["emulated"]) == (sanitizer is None)


def test_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_selection, "RUNS_ALL", False)
    assert list(case_selection.share(range(7), 3)) == [0, 3, 6]
    monkeypatch.setattr(case_selection, "RUNS_ALL", True)
    assert list(case_selection.share(range(7), 3)) == list(range(7))
