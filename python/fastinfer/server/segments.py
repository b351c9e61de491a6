"""The parts of an answer in order: texts, reasoning, tool calls. Two interfaces stream their beginnings and ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class SegmentKind(Enum):
    """Kind of a part."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass
class Segment:
    """A part of an answer.

    Attributes:
        index: number of the part.
        kind: what it is.
        text: its text so far; the arguments of a call.
        call_id, name: id and tool of a call.
    """

    index: int
    kind: SegmentKind
    text: str = ""
    call_id: str = ""
    name: str = ""


class Change(Enum):
    """Change of a part."""

    BEGIN = "begin"
    MORE = "more"
    END = "end"


class Segments:
    """Turns events into parts that begin, grow and end one after another.

    Attributes:
        all: the parts so far.
    """

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._is_open = False

    def add(self, events: Iterable[Event]) -> list[tuple[Change, Segment, str]]:
        """Return the changes that events bring, each with its part and the new text."""
        changes: list[tuple[Change, Segment, str]] = []
        for event in events:
            match event:
                case ToolCallStart():
                    changes += self._begin(SegmentKind.CALL, event.id, event.name)
                    continue
                case ToolCallArguments():
                    kind = SegmentKind.CALL
                case TextDelta():
                    kind = SegmentKind.TEXT
                case ReasoningDelta():
                    kind = SegmentKind.REASONING
            if not self._is_open or self.all[-1].kind is not kind:
                changes += self._begin(kind)
            segment = self.all[-1]
            segment.text += event.text
            changes.append((Change.MORE, segment, event.text))
        return changes

    def end(self) -> list[tuple[Change, Segment, str]]:
        """Return the change that ends the last part, if one is open."""
        if not self._is_open:
            return []
        self._is_open = False
        return [(Change.END, self.all[-1], "")]

    def _begin(self, kind: SegmentKind, call_id: str = "", name: str = "") -> list[tuple[Change, Segment, str]]:
        changes = self.end()
        self.all.append(Segment(len(self.all), kind, "", call_id, name))
        self._is_open = True
        return [*changes, (Change.BEGIN, self.all[-1], "")]
