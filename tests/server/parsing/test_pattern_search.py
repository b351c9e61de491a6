import random
import re

import pytest

from fastinfer.server.parsing.pattern import PatternError, compile_patterns
from fastinfer.server.parsing.pattern_search import MAX_LOOK_AHEAD, PatternSearch

PATTERNS = [
    "a",
    "ab|a",
    "a|ab",
    "a+b",
    "a+?b",
    "(?:ab)+",
    "a{2,3}",
    "a{2}c?",
    r"\s*a",
    r"[^ab]c",
    "b(?P<x>a*)(?P<y>c?)",
    "(?P<x>a|ab)(?P<y>c|bc)?",
    "a.*?c",
    "(?:a|b)*c",
    "(?:a*)*b",
]


def search(pattern: str, pieces: list[str]) -> tuple[str, str, dict[str, str]] | None:
    """The text before the match, the match and its groups."""
    searched = PatternSearch((pattern,))
    for piece in pieces:
        place = searched.read(piece, 0)
        if searched.match is not None:
            assert place <= len(piece)
            break
    searched.finish()
    if searched.match is None:
        assert searched.take() == "".join(pieces)
        return None
    return searched.take(), searched.match.text, searched.match.groups


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_match_is_that_of_a_back_tracking_search(pattern: str) -> None:
    rng = random.Random(pattern)
    num_matches = 0
    for _ in range(300):
        text = "".join(rng.choices("abc ", k=rng.randrange(12)))
        expected = re.search(pattern, text, re.DOTALL)
        found = search(pattern, [text])
        assert found == search(pattern, list(text))
        if expected is None:
            assert found is None
            continue
        num_matches += 1
        groups = {name: value for name, value in expected.groupdict().items() if value is not None}
        assert found == (text[: expected.start()], expected[0], groups)
    assert num_matches > 20


def test_what_lies_behind_a_match_is_returned() -> None:
    searched = PatternSearch(("a(?:b*c)?",))
    assert searched.read("xabbd", 0) == 5
    assert searched.match is not None
    assert (searched.take(), searched.match.text, searched.rest) == ("x", "a", "bbd")


def test_the_search_for_a_longer_match_is_bounded() -> None:
    searched = PatternSearch(("a(?:b*c)?",))
    assert searched.read("a" + "b" * 1000, 0) == MAX_LOOK_AHEAD + 1
    assert searched.match is not None
    assert searched.match.text == "a"


def test_the_beginning_matches_once() -> None:
    assert search("^a", ["ba"]) is None
    for text, found in (("ab", True), ("ba", False)):
        searched = PatternSearch(("^a",), at_beginning=True)
        searched.read(text, 0)
        searched.finish()
        assert (searched.match is not None) is found


@pytest.mark.parametrize(
    "pattern", ["", "a*", "a|", r"\bx", r"(?i)a", "(?<=a)b", "a**", "a++", ")", "*", r"\1", "a{3,2}"]
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_patterns((pattern,))


def test_nested_repetitions_do_not_explode() -> None:
    with pytest.raises(PatternError):
        compile_patterns(("(?:" * 30 + "a" + ")*" * 30,))
    with pytest.raises(PatternError, match="too large"):
        compile_patterns(("(?:(?:(?:a{100}){100}){100}){100}",))
