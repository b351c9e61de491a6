"""Matches stop strings in a text that grows piece by piece."""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache


class StopStringAutomaton:
    """The Aho-Corasick automaton of some stop strings (Aho and Corasick, 1975, https://doi.org/10.1145/360825.360855).

    A state stands for a prefix of a stop string: the longest one with which the text so far ends. State 0 is the empty
    prefix. Matching a text takes at most two transitions per character on average, however many stop strings there are
    and however they repeat themselves.

    Args:
        stop: the stop strings; none of them is empty.

    Attributes:
        depths: length of each state's prefix.
        ends: the longest stop string with which each state's prefix ends, or ``None``.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self.depths = [0]
        self.ends: list[str | None] = [None]
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]  # of each state's prefix, the longest suffix that is another state's prefix
        for string in stop:
            self._add(string)
        self._link()

    def next_state(self, state: int, character: str) -> int:
        """Return the state after one more character of the text."""
        while character not in self._children[state] and state:
            state = self._shorter[state]
        return self._children[state].get(character, 0)

    def _add(self, string: str) -> None:
        """Add the states of a stop string's prefixes."""
        state = 0
        for character in string:
            if character not in self._children[state]:
                self._children[state][character] = len(self.depths)
                self.depths.append(self.depths[state] + 1)
                self.ends.append(None)
                self._children.append({})
                self._shorter.append(0)
            state = self._children[state][character]
        self.ends[state] = string

    def _link(self) -> None:
        """Find the shorter state of each state, and the stop strings with which it ends, the shortest states first."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                self._shorter[child] = self.next_state(self._shorter[state], character)
                queue.append(child)
            self.ends[state] = self.ends[state] or self.ends[self._shorter[state]]


# Requests often have the same stop strings. An automaton of 32 strings of 256 characters takes 2 MB.
_automaton = lru_cache(maxsize=8)(StopStringAutomaton)


class StopStringMatcher:
    """Finds the first stop string in a growing text, and releases the text before it.

    Text that may be the beginning of a stop string is held back, so that released text never has to be withdrawn. If
    several stop strings occur, the one that ends first wins, and of those the longest. The result therefore does not
    depend on how the text is divided into pieces. The work is linear in the length of the text.

    Args:
        stop: the stop strings; none of them is empty.
        includes_stop: whether the stop string that was found is released too.

    Attributes:
        matched: the stop string that was found; ``None`` until then. After a match nothing may be added.
    """

    def __init__(self, stop: Iterable[str], includes_stop: bool = False) -> None:
        self.matched: str | None = None
        self._includes_stop = includes_stop
        self._automaton = _automaton(tuple(stop))
        self._state = 0
        self._held: deque[str] = deque()  # the text that is held back, character by character

    def add(self, piece: str, may_end: bool = True) -> str:
        """Append a piece of text, and return the text that is released by it.

        Args:
            piece: the text.
            may_end: whether a stop string that is complete within the piece counts.
        """
        automaton = self._automaton
        for character in piece:
            self._state = automaton.next_state(self._state, character)
            self._held.append(character)
            self.matched = automaton.ends[self._state] if may_end else None
            if self.matched is not None:
                released = self._release(0 if self._includes_stop else len(self.matched))
                self._held.clear()
                return released
        return self._release(automaton.depths[self._state])

    def flush(self) -> str:
        """Return the held text at the end of the text, where it can no longer become a stop string."""
        return self._release(0)

    def _release(self, num_held: int) -> str:
        """Return the held text except its last ``num_held`` characters, which stay."""
        return "".join([self._held.popleft() for _ in range(len(self._held) - num_held)])
