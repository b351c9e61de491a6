"""Events that a parser finds in a generated text, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins.

    Attributes:
        index: number of the call in this answer, from 0.
        id: id that is unique among all calls.
        name: name of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments. All pieces together are a JSON object, unless the model stops in the middle of it."""

    index: int
    text: str


Event = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments
