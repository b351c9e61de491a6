import random
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from fastinfer.engine import stop_strings
from fastinfer.engine.stop_strings import StopStringAutomaton, StopStringMatcher
from fastinfer.engine.text_stream import TextStream


class Letters:
    """A detokenizer whose token i is the i-th piece."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def feed(pieces: list[str], stop: tuple[str, ...], rest: str = "") -> tuple[list[str], str | None]:
    """What was given out after each piece and at the end, and the stop string that was met."""
    stream = TextStream(Letters(pieces, rest), stop)
    texts = []
    for index in range(len(pieces)):
        stream.add(index)
        texts.append(stream.utf8.decode())
        if stream.stopped_by is not None:
            return texts, stream.stopped_by
    stream.flush()
    return [*texts, stream.utf8.decode()], stream.stopped_by


@pytest.mark.parametrize(
    ("min_tokens", "stop", "text", "stopped_by"),
    [
        (0, ("ab", "cab"), "", "ab"),
        (1, ("ab", "cab"), "", "ab"),  # which ends in the second token
        (2, ("ab", "cab"), "ab", "cab"),
        (2, ("ab",), "abc", "ab"),
        (4, ("b",), "abca", "b"),
        (5, ("b", "cabx"), "abcab", None),
    ],
)
def test_no_stop_string_ends_in_the_first_tokens(
    min_tokens: int, stop: tuple[str, ...], text: str, stopped_by: str | None
) -> None:
    stream = TextStream(Letters(list("abcab")), stop, min_tokens=min_tokens)
    for index in range(5):
        if stream.stopped_by is None:
            stream.add(index)
    if stream.stopped_by is None:
        stream.flush()
    assert (stream.utf8.decode(), stream.stopped_by) == (text, stopped_by)


@pytest.mark.parametrize(
    ("pieces", "stop", "texts", "stopped_by"),
    [
        (["ab", "cd"], (), ["ab", "abcd", "abcd"], None),
        (["ab", "cd"], ("x",), ["ab", "abcd", "abcd"], None),
        (["ab", "cd"], ("bc",), ["a", "a"], "bc"),
        (["ab", "xd"], ("bc",), ["a", "abxd", "abxd"], None),
        (["ab"], ("bc",), ["a", "ab"], None),  # held back, then given out at the end
        (["a", "a", "b"], ("aab",), ["", "", ""], "aab"),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", "a"], "aab"),
        (["hello STOP more"], ("STOP",), ["hello "], "STOP"),
        (["abcd"], ("abcd", "bc"), ["a"], "bc"),  # bc is complete before abcd is
        (["a", "b", "c", "d"], ("abcd", "bc"), ["", "", "a"], "bc"),
        (["xabc"], ("bc", "abc"), ["x"], "abc"),  # both end here: the longer one
        (["x", "", "y"], ("xy",), ["", "", ""], "xy"),
    ],
)
def test_stop_strings(pieces: list[str], stop: tuple[str, ...], texts: list[str], stopped_by: str | None) -> None:
    assert feed(pieces, stop) == (texts, stopped_by)


def test_a_stop_string_may_come_to_light_at_the_end() -> None:
    assert feed(["ab"], ("b\ufffd",), rest="\ufffd") == (["a", "a"], "b\ufffd")


def test_the_result_does_not_depend_on_the_borders_of_tokens() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=12))
        stop = tuple("".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3)))
        cuts = sorted(rng.sample(range(13), rng.randint(0, 5)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 12], strict=True)]
        texts, stopped_by = feed(pieces, stop)
        assert (texts[-1], stopped_by) == _by_characters(text, stop)
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def _by_characters(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_that_contain_each_other() -> None:
    rng = random.Random(1)
    num_found = 0
    for _ in range(3000):
        text = "".join(rng.choices("abc", weights=[6, 3, 1], k=30))
        stop = tuple("".join(rng.choices("abc", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 6)))
        texts, stopped_by = feed(list(text), stop)
        num_found += stopped_by is not None
        assert (texts[-1], stopped_by) == _by_characters(text, stop)
    assert 500 < num_found < 3000


def count_lines(function: Callable[[], object]) -> int:
    """The number of lines of the matcher that a call executes; a loop of Python counts in each round."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != stop_strings.__file__:
            return None
        lines += event == "line"
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(previous)
    return lines


@pytest.mark.parametrize("length", [10, 100, 500])
@pytest.mark.parametrize("piece", [1, 7])
@pytest.mark.parametrize("kind", ["repeats", "nearly", "suffixes", "many"])
def test_the_work_is_linear_in_the_text_and_the_stop_strings(kind: str, piece: int, length: int) -> None:
    """For the texts that are worst: they nearly match all the time."""
    stop, text = {
        "repeats": (("a" * length + "b",), "a" * 3000),
        "nearly": (("a" * length + "b",), ("a" * (length - 1) + "c") * (3000 // length)),
        "suffixes": (tuple("a" * n + "b" for n in range(length - 9, length)), "a" * 3000),
        "many": (tuple(f"{n:03}" + "x" * length for n in range(30)), ("029" + "x" * (length - 1)) * (3000 // length)),
    }[kind]
    pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
    matcher = StopStringMatcher(stop)  # an automaton is kept, so that it is not always built here
    released: list[str] = []
    count = count_lines(lambda: released.extend(map(matcher.add, pieces)))
    assert "".join(released) + matcher.flush() == text
    assert matcher.matched is None
    assert count <= 20 * len(text)
    assert count_lines(lambda: StopStringAutomaton(stop)) <= 30 * sum(map(len, stop)) + 100
