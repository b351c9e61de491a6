r"""A check that a file's regular expressions split any text in linear time.

The tokenizers library searches by backtracking. An expression like ``(a+)+$`` takes exponential time, ``\s+$`` takes
quadratic time on a long run of spaces, and nothing can interrupt a search. So only expressions are accepted whose time
is known from how they are written:

- Loops without bound (``+``, ``*``, ``{2,}``) repeat one character or class, and do not stand in groups. A loop may
  also repeat a group whose alternatives take one character each, if nothing that is required follows.
- Other repetitions and alternatives can be combined in at most ``MAX_WAYS`` ways.
- What follows a loop is optional, so that nothing is tried again with fewer repetitions. The exception is an
  alternative like ``\s*[\r\n]+`` or ``\s+(?!\S)`` if a later one, here ``\s+``, takes the same run as a whole: then
  each run is walked through once for each alternative. Others are ``(?<!\s)\s+$``, which starts at the beginning of a
  run alone, and ``(?<![^\S\r\n])\s*[\r\n]+``, which starts there or behind a line end, up to which it takes all.

All expressions that are in use for byte-level vocabularies are like that, as their authors had to avoid long searches,
too.
"""

import re
from dataclasses import dataclass

MAX_WAYS = 200
# Takes a run of spaces up to its last line end; where it fails, it is not tried again within the run.
_LINE_ENDS = [r"(?<![^\S\r\n])", r"\s", r"[\r\n]"]

_QUANTIFIER = re.compile(r"([?*+]|\{\d*,?\d*\})([?+]?)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[rntfvaesSdDwWhH]|[^\w\s])", re.ASCII
)
_ASSERTION = re.compile(r"\^|\$|\\[bBAzZG]")
_GROUP = re.compile(r"\((?:\?(?:<?[=!]|i?:))?(?!\?|\*)")


class PatternError(ValueError):
    """The expression has a part that is not accepted; the message names it."""


@dataclass(frozen=True)
class _Item:
    """A part of an alternative.

    Attributes:
        text: source of the part, without its quantifier.
        low, high: number of repetitions; ``high`` is ``None`` for a loop.
        ways: number of ways to match one repetition of a group.
        consumes: whether it takes characters; if not, it is an assertion.
        takes_one: whether it is a group whose alternatives take one character each.
    """

    text: str
    low: int = 1
    high: int | None = 1
    ways: int = 1
    consumes: bool = True
    takes_one: bool = False

    @property
    def is_required(self) -> bool:
        return self.low > 0


def check_pattern(pattern: str) -> None:
    """Check that the time of any search is linear in the length of the text.

    Raises:
        PatternError: it may not be, or the syntax is not known.
    """
    parser = _Parser(pattern)
    alternatives = parser.alternatives()
    if parser.place < len(pattern):
        raise PatternError(f"{pattern[parser.place :]!r:.40} is not expected")
    for index, items in enumerate(alternatives):
        if _ways(items) > MAX_WAYS:
            raise PatternError("an alternative can match in too many ways")
        _check_loops(items, alternatives[index + 1 :])


def _ways(items: list[_Item]) -> int:
    """Count the ways to match an alternative, apart from loops."""
    ways = 1
    for item in items:
        ways *= 1 if item.high is None else item.ways**item.high * (item.high - item.low + 1)
        if ways > MAX_WAYS:
            break
    return ways


def _takes_one(items: list[_Item]) -> bool:
    """Whether an alternative takes one character, whatever it looks at."""
    taking = [item for item in items if item.consumes]
    return len(taking) == 1 and (taking[0].low, taking[0].high) == (1, 1) and not taking[0].text.startswith("(")


def _check_loops(items: list[_Item], later: list[list[_Item]]) -> None:
    loops = [place for place, item in enumerate(items) if item.high is None]
    if not loops or not any(item.is_required for item in items[loops[0] + 1 :]):
        return
    loop = items[loops[0]].text
    if items[0].text == f"(?<!{loop})" and loops == [1] and not any(item.consumes for item in items[2:]):
        return
    if [item.text for item in items] == _LINE_ENDS:
        return
    if any(items[place].text.startswith("(") for place in loops):
        raise PatternError(f"what follows the loop of the group {loop!r:.40} is not optional")
    if len(loops) > 2 or (len(loops) == 2 and any(item.is_required for item in items[loops[1] + 1 :])):
        raise PatternError(f"what follows the loops of {loop!r:.40} is not optional")
    if not any(_takes_runs(other, loop) for other in later):
        raise PatternError(f"what follows the loop of {loop!r:.40} is not optional, and no alternative takes its run")


def _takes_runs(items: list[_Item], text: str) -> bool:
    """Whether an alternative matches every run of a character or class, as a whole."""
    place = next((i for i, item in enumerate(items) if item.text == text and item.high is None), None)
    return (
        place is not None
        and items[place].low <= 1
        and not any(item.is_required for item in [*items[:place], *items[place + 1 :]])
    )


class _Parser:
    """Reader of the part of Oniguruma's syntax that the module's rules allow."""

    def __init__(self, pattern: str) -> None:
        self.place = 0
        self._pattern = pattern

    def alternatives(self, depth: int = 0) -> list[list[_Item]]:
        """Read up to the end of the expression or of a group."""
        found: list[list[_Item]] = [[]]
        while self.place < len(self._pattern) and self._pattern[self.place] != ")":
            if self._pattern[self.place] == "|":
                self.place += 1
                found.append([])
            else:
                found[-1].append(self._item(depth))
        return found

    def _item(self, depth: int) -> _Item:
        item = self._assertion() or self._group(depth) or _Item(self._character())
        match = _QUANTIFIER.match(self._pattern, self.place)
        if not match:
            return item
        self.place = match.end()
        low, high = self._limits(match[1])
        if match[2] == "?" or (match[2] and match[1].startswith("{")):  # "{2}+" repeats the repetition
            raise PatternError(f"the quantifier {match[0]!r} is not supported")
        is_loop = high is None and item.text.startswith("(") and not item.takes_one
        if not item.consumes or is_loop or (item.ways > 1 and high is not None and high > 1):
            raise PatternError(f"{item.text!r:.40} is repeated")
        if high is None and depth:
            raise PatternError(f"the loop of {item.text!r:.40} is in a group")
        return _Item(item.text, low, high, item.ways)

    def _limits(self, text: str) -> tuple[int, int | None]:
        """Return the least and the greatest number of repetitions that a quantifier allows."""
        if text in ("?", "*", "+"):
            return int(text == "+"), 1 if text == "?" else None
        first, comma, last = text[1:-1].partition(",")
        if not (first or last):
            raise PatternError(f"{text!r} is not a quantifier")
        low = int(first or 0)
        return low, (int(last) if last else None) if comma else low

    def _assertion(self) -> _Item | None:
        match = _ASSERTION.match(self._pattern, self.place)
        if not match:
            return None
        self.place = match.end()
        return _Item(match[0], consumes=False)

    def _group(self, depth: int) -> _Item | None:
        if self._pattern[self.place] != "(":
            return None
        match = _GROUP.match(self._pattern, self.place)
        if not match or depth > 10:
            raise PatternError(f"the group {self._pattern[self.place :]!r:.20} is not supported")
        start, self.place = self.place, match.end()
        alternatives = self.alternatives(depth + 1)
        if self.place == len(self._pattern):
            raise PatternError("a group is not closed")
        self.place += 1
        return _Item(
            self._pattern[start : self.place],
            ways=sum(map(_ways, alternatives)),
            consumes=not match[0].endswith(("=", "!")),
            takes_one=all(map(_takes_one, alternatives)),
        )

    def _character(self) -> str:
        """Read a character, an escape or a class, and return its source."""
        start = self.place
        char = self._pattern[start]
        if char == "[":
            self._class(0)
        elif char == "\\":
            self._escape()
        elif char in "?*+{":
            raise PatternError(f"{self._pattern[start:]!r:.20} repeats nothing")
        else:
            self.place += 1
        return self._pattern[start : self.place]

    def _escape(self) -> None:
        match = _ESCAPE.match(self._pattern, self.place)
        if not match:
            raise PatternError(f"the escape {self._pattern[self.place : self.place + 4]!r} is not supported")
        self.place = match.end()

    def _class(self, depth: int) -> None:
        """Read a class up to its bracket; classes may contain classes."""
        self.place += 2 if self._pattern[self.place + 1 : self.place + 2] == "^" else 1
        if self._pattern[self.place : self.place + 1] == "]" or depth > 10:
            raise PatternError("an empty class, or one that is nested too deeply")
        while self.place < len(self._pattern):
            char = self._pattern[self.place]
            if char == "]":
                self.place += 1
                return
            if char == "[":
                self._class(depth + 1)
            elif char == "\\":
                self._escape()
            else:
                self.place += 1
        raise PatternError("a class is not closed")
