"""Errors that are raised at a given line of the engine."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fastinfer.engine

ENGINE = str(Path(fastinfer.engine.__file__).parent)
Line = tuple[str, int]


class Fault(RuntimeError):
    """As the operators raise it."""


class Interrupt(KeyboardInterrupt):
    """As a user raises it."""


@cache
def lines_of(code: CodeType) -> frozenset[int | None]:
    return frozenset(line for _, _, line in code.co_lines())


class Tracer:
    """Calls a step with a trace function that may raise at one line; without a line, at the nth of all.

    With ``call`` it traces that call alone, counted from 1, and ``occurrence`` is one within it.
    """

    def __init__(
        self, line: Line | None = None, occurrence: int = 0, error: type[BaseException] = Fault, call: int | None = None
    ) -> None:
        self.seen: Counter[Line] = Counter()
        self.calls: defaultdict[Line, list[int]] = defaultdict(list)  # for each time that a line ran, the call
        self.line, self.occurrence, self.error, self.call = line, occurrence, error, call
        self.num_calls = 0
        self.has_raised = False

    def __call__(self, function: Callable[[], Any]) -> Any:
        self.num_calls += 1
        if self.has_raised or self.call not in (None, self.num_calls):
            return function()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if self.line is None:
            return self._at if code.co_filename.startswith(ENGINE) else None
        # Other functions go on untraced.
        return self._at if code.co_filename == self.line[0] and self.line[1] in lines_of(code) else None

    def _at(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self.has_raised:
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] += 1
            self.calls[line].append(self.num_calls)
            count = self.seen.total() if self.line is None else self.seen[self.line]
            if self.line in (None, line) and count == self.occurrence:
                self.has_raised = True
                raise self.error(f"a fault at {line[0]}:{line[1]}")
        return self._at
