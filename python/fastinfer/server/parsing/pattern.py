r"""Regular expressions as programs that a search in linear time can run.

A program has the instructions of a Pike machine (https://swtch.com/~rsc/regexp/regexp2.html). Accepted are characters,
classes, ``.``, groups, named groups, alternatives, greedy and lazy repetitions, and ``^`` for the beginning of a text.
``$`` and ``\Z`` never match: a region that is still open at the end of a text ends there anyway. ``.`` matches line
breaks. Look-around, back-references and other assertions are refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_INSTRUCTIONS = 2000
MAX_DEPTH = 8  # each level of repetitions doubles the time of compilation
MAX_GROUPS = 8

_ITEM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]", re.DOTALL)
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_QUANTIFIER = re.compile(r"([*+?]|\{\d*,?\d*\})(\??)")
_GROUP = re.compile(r"\((\?:|\?P<(\w+)>)?(?!\?)")


class PatternError(ValueError):
    """The expression has a part that is not accepted; the message names it."""


class CharacterClass:
    """The characters that a part of an expression matches, such as ``[^>]``.

    Args:
        source: the part, which matches single characters only.
    """

    def __init__(self, source: str) -> None:
        try:
            self._match = re.compile(source, re.DOTALL).fullmatch
        except (re.error, OverflowError) as error:
            raise PatternError(f"{source!r:.40}: {error}") from None
        self._known: dict[str, bool] = {}

    def __contains__(self, character: str) -> bool:
        if (known := self._known.get(character)) is None:
            known = self._match(character) is not None
            if len(self._known) < 256:
                self._known[character] = known
        return known


@dataclass
class Instruction:
    """One step of a program.

    Attributes:
        kind: "char", "split", "save", "begin", "never" or "match".
        characters: what "char" matches: a class, or one character.
        source: the expression of ``characters``.
        targets: where "split" goes on, the preferred one first. The others go on with the next instruction.
        slot: number of "save", twice that of the named group, one more for its end.
        pattern: number of the expression that "match" has found.
    """

    kind: str
    characters: CharacterClass | str = ""
    source: str = ""
    targets: list[int] = field(default_factory=list)
    slot: int = 0
    pattern: int = 0


@dataclass
class Program:
    """The compiled form of several expressions.

    Attributes:
        instructions: the program; it starts at instruction 0.
        start: the "char" instructions that are reached from there, in order, if no group begins before them and where
            ``^`` does not match; otherwise ``None``.
        names: the named groups.
        first: matches the characters with which a match can begin.
        first_visible: the same without white space, if that is read at the beginning of a match and changes nothing; it
            then matters only right before one of these characters. Otherwise ``None``.
    """

    instructions: list[Instruction]
    start: list[int] | None
    names: list[str]
    first: re.Pattern[str]
    first_visible: re.Pattern[str] | None


@lru_cache(maxsize=256)
def compile_patterns(patterns: tuple[str, ...]) -> Program:
    """Compile expressions to one program, which prefers earlier ones.

    Raises:
        PatternError: an expression is malformed, has a part that is not accepted, is too large, or matches no
            characters.
    """
    program = [Instruction("split")]
    names: list[str] = []
    for number, pattern in enumerate(patterns):
        program[0].targets.append(len(program))
        _Compiler(pattern, program, names).compile()
        program.append(Instruction("match", pattern=number))
    beginning = _reachable(program, 0)
    if any(program[place].kind == "match" for place in beginning):
        raise PatternError(f"one of {patterns!r:.80} matches without any character")
    characters = [place for place in beginning if program[place].kind == "char"]
    sources = {program[place].source for place in characters}
    blank = [place for place in characters if " " in program[place].characters]
    is_changed = any(
        program[place].source != r"\s" or not _reachable(program, place + 1) <= beginning | {place + 1}
        for place in blank
    )
    first_visible = None if is_changed else _any_of(sources - {r"\s"})
    return Program(program, _start(program), names, _any_of(sources), first_visible)


def _start(program: list[Instruction]) -> list[int] | None:
    """Return the first "char" instructions in order of preference; ``None`` if a group begins before one of them."""
    places = []
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        match program[place].kind:
            case "char":
                places.append(place)
            case "split":
                waiting += reversed(program[place].targets)
            case "save":
                return None
    return places


def _any_of(sources: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(sorted(sources)) or r"(?!)", re.DOTALL)


def _reachable(program: list[Instruction], start: int) -> set[int]:
    """Return the instructions that are reached from one without a character."""
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place not in reached:
            reached.add(place)
            instruction = program[place]
            if instruction.kind == "split":
                waiting += instruction.targets
            elif instruction.kind in ("save", "begin"):
                waiting.append(place + 1)
    return reached


class _Compiler:
    """Appends one expression's instructions to a program."""

    def __init__(self, pattern: str, program: list[Instruction], names: list[str]) -> None:
        self._pattern = pattern
        self._program = program
        self._names = names
        self._place = 0

    def compile(self) -> None:
        self._alternatives(0)
        if self._place < len(self._pattern):
            raise PatternError(f"{self._pattern[self._place :]!r:.40} is not expected")

    def _alternatives(self, depth: int) -> None:
        """Compile up to the end of the expression or of a group."""
        if depth > MAX_DEPTH:
            raise PatternError(f"groups must be nested at most {MAX_DEPTH} deep")
        split = self._emit(Instruction("split"))
        jumps = []
        while True:
            split.targets.append(len(self._program))
            while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
                self._repeated(depth)
            if self._pattern[self._place : self._place + 1] != "|":
                break
            self._place += 1
            jumps.append(self._emit(Instruction("split")))
        for jump in jumps:
            jump.targets.append(len(self._program))

    def _repeated(self, depth: int) -> None:
        """Compile an item and its quantifier; each repetition compiles the item's source again."""
        start = self._place
        begin = len(self._program)
        self._item(depth)
        after_item = self._place
        quantifier = _QUANTIFIER.match(self._pattern, self._place)
        if quantifier is None:
            return
        low, high = _bounds(quantifier[1])
        lazy = bool(quantifier[2])
        end = quantifier.end()
        if self._pattern[end : end + 1] in ("*", "+", "?"):
            raise PatternError(f"{self._pattern[start : end + 1]!r:.40} is not expected")
        del self._program[begin:]

        def again() -> None:
            self._place = start
            self._item(depth)

        for _ in range(low):
            again()
        if high is None:
            loop = len(self._program)

            def again_and_back() -> None:
                again()
                self._emit(Instruction("split", targets=[loop]))

            self._optional(lazy, again_and_back)
        else:
            for _ in range(high - low):
                self._optional(lazy, again)
        self._place = max(end, after_item)

    def _optional(self, lazy: bool, body: Callable[[], object]) -> None:
        split = self._emit(Instruction("split"))
        inside = len(self._program)
        body()
        outside = len(self._program)
        split.targets = [outside, inside] if lazy else [inside, outside]

    def _item(self, depth: int) -> None:
        """Compile a character, a class, an assertion or a group."""
        if self._pattern[self._place] == "(":
            self._group(depth)
            return
        match = _ITEM.match(self._pattern, self._place)
        if match is None or match[0] in ("*", "+", "?", ")"):
            raise PatternError(f"{self._pattern[self._place :]!r:.40} is not expected")
        self._place = match.end()
        source = match[0]
        if source == "^":
            self._emit(Instruction("begin"))
        elif source in ("$", r"\Z", r"\z"):
            self._emit(Instruction("never"))
        elif source[0] == "\\" and source[1].isalnum() and source[1] not in "sSwWdDntrfv":
            raise PatternError(f"{source} is not supported")
        elif source[0] in "\\[." and not (source[0] == "\\" and not source[1].isalnum()):
            self._emit(Instruction("char", characters=CharacterClass(source), source=source))
        else:
            self._emit(Instruction("char", characters=source[-1], source=re.escape(source[-1])))

    def _group(self, depth: int) -> None:
        match = _GROUP.match(self._pattern, self._place)
        if match is None:
            raise PatternError(f"{self._pattern[self._place :]!r:.40} is not supported")
        self._place = match.end()
        slot = self._slot(match[2]) if match[2] else None
        if slot is not None:
            self._emit(Instruction("save", slot=slot))
        self._alternatives(depth + 1)
        if self._pattern[self._place : self._place + 1] != ")":
            raise PatternError(f"{self._pattern!r:.40} has a group that does not end")
        self._place += 1
        if slot is not None:
            self._emit(Instruction("save", slot=slot + 1))

    def _slot(self, name: str) -> int:
        if name not in self._names:
            if len(self._names) == MAX_GROUPS:
                raise PatternError(f"at most {MAX_GROUPS} groups can have names")
            self._names.append(name)
        return 2 * self._names.index(name)

    def _emit(self, instruction: Instruction) -> Instruction:
        if len(self._program) >= MAX_INSTRUCTIONS:
            raise PatternError(f"{self._pattern!r:.40} is too large")
        self._program.append(instruction)
        return instruction


def _bounds(quantifier: str) -> tuple[int, int | None]:
    """Return the number of repetitions; ``None`` for any number."""
    if quantifier in _QUANTIFIERS:
        return _QUANTIFIERS[quantifier]
    low, comma, high = quantifier[1:-1].partition(",")
    if not (low or high) or max(len(low), len(high)) > 4:
        raise PatternError(f"{quantifier} is not supported")
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    if most is not None and most < least:
        raise PatternError(f"{quantifier} has no repetitions")
    return least, most
