"""Finds the first match of several regular expressions in a text that grows piece by piece."""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from fastinfer.server.parsing.pattern import compile_patterns

# Once a match is found, the search goes on for this many characters to see whether a preferred one, a longer one as a
# rule, matches too. The bound keeps the work linear: these characters may be searched again.
MAX_LOOK_AHEAD = 64

_Slots = tuple[int, ...]
_Thread = tuple[int, int, _Slots]  # an instruction, where the match begins, and the positions of its groups


@dataclass(frozen=True)
class Match:
    """A part of the text that an expression matches.

    Attributes:
        pattern: number of the expression.
        text: the part of the text.
        groups: texts of the named groups that took part.
    """

    pattern: int
    text: str
    groups: dict[str, str]


class PatternSearch:
    """Searches for the match that begins first; of those, for the one that a back-tracking search would prefer.

    Text that may belong to a match is held back. The result does not depend on how the text is divided into pieces. The
    work is linear in the text: all ways to match are followed at once, and no two of them are ever at the same
    instruction (a Pike machine).

    Args:
        patterns: the expressions; earlier ones are preferred.
        at_beginning: whether ``^`` matches at the beginning of this text.

    Attributes:
        match: the match, once it is certain; then nothing may be read any more.
        rest: text that was read but lies behind the match, at most ``MAX_LOOK_AHEAD`` characters.

    Raises:
        PatternError: an expression is not accepted.
    """

    def __init__(self, patterns: tuple[str, ...], at_beginning: bool = False) -> None:
        program = compile_patterns(patterns)
        self.match: Match | None = None
        self.rest = ""
        self._program = program.instructions
        self._start = program.start
        self._no_slots = (-1,) * (2 * len(program.names))
        self._names = program.names
        self._first = program.first
        self._first_visible = program.first_visible
        self._at_beginning = at_beginning
        self._threads: list[_Thread] = []
        self._found: tuple[int, int, int, _Slots] | None = None  # pattern, start, end and groups of the best match
        self._held: deque[str] = deque()  # characters from the start of the first thread on
        self._position = 0  # number of characters that were read
        self._released: list[str] = []

    def read(self, text: str, place: int) -> int:
        """Read ``text`` from ``place`` on, up to its end or up to where a match is certain, and return that place."""
        while place < len(text) and self.match is None:
            if not self._held and (end := self._next_beginning(text, place)) > place:
                self._released.append(text[place:end])
                self._position += end - place
                place = end
                continue
            self._step(text[place])
            place += 1
        return place

    def finish(self) -> None:
        """End the text: what was found is certain now, and nothing is held back any more."""
        if self._found is not None:
            self._resolve()
        else:
            self._release(self._position)

    def take(self) -> str:
        """Return the text that lies before any match and was not yet returned."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _next_beginning(self, text: str, place: int) -> int:
        """Return where a match may begin, or the length of the text."""
        candidate = (self._first_visible or self._first).search(text, place)
        end = len(text) if candidate is None else candidate.start()
        if self._first_visible is None:
            return end
        return place + len(text[place:end].rstrip())

    def _step(self, character: str) -> None:
        """Let all threads read one character."""
        threads = self._threads
        if self._found is None and self._first.match(character):
            self._add_start(threads)
        self._held.append(character)
        self._position += 1
        self._threads = []
        seen: set[int] = set()
        for place, start, slots in threads:
            if character in self._program[place].characters and self._follow(
                place + 1, start, slots, self._threads, seen
            ):
                break  # what comes later is not preferred
        if self._found is not None:
            if not self._threads or self._position - self._found[2] >= MAX_LOOK_AHEAD:
                self._resolve()
        else:
            self._release(self._threads[0][1] if self._threads else self._position)

    def _add_start(self, threads: list[_Thread]) -> None:
        """Add the threads of a match that begins here."""
        known = {thread[0] for thread in threads}
        if self._start is None or (self._at_beginning and self._position == 0):
            self._follow(0, self._position, self._no_slots, threads, known)
        else:
            threads += [(place, self._position, self._no_slots) for place in self._start if place not in known]

    def _follow(self, place: int, start: int, slots: _Slots, threads: list[_Thread], seen: set[int]) -> bool:
        """Add the threads that continue at an instruction, and return whether one of them is a match."""
        waiting = [(place, slots)]
        while waiting:
            place, slots = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            instruction = self._program[place]
            match instruction.kind:
                case "char":
                    threads.append((place, start, slots))
                case "split":
                    waiting += [(target, slots) for target in reversed(instruction.targets)]
                case "save":
                    slot = instruction.slot
                    waiting.append((place + 1, (*slots[:slot], self._position, *slots[slot + 1 :])))
                case "begin":
                    if self._at_beginning and self._position == 0:
                        waiting.append((place + 1, slots))
                case "match":
                    self._found = (instruction.pattern, start, self._position, slots)
                    return True
        return False

    def _resolve(self) -> None:
        """Make the best match the result."""
        assert self._found is not None
        pattern, start, end, slots = self._found
        self._release(start)
        held = list(self._held)
        groups = {
            name: "".join(held[slots[2 * number] - start : slots[2 * number + 1] - start])
            for number, name in enumerate(self._names)
            if slots[2 * number + 1] >= 0
        }
        self.match = Match(pattern, "".join(held[: end - start]), groups)
        self.rest = "".join(held[end - start :])

    def _release(self, position: int) -> None:
        """Release the held text up to a position."""
        count = position - (self._position - len(self._held))
        self._released.append("".join(islice(self._held, count)))
        for _ in range(count):
            self._held.popleft()
