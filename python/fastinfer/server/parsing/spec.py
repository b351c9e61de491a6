"""Markers of a model's reasoning and tool calls: plain data, from which the parser works."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from fastinfer.server.parsing.value_reader import JSON, Syntax


class Passage(Enum):
    """Regions that are passed on as text."""

    REASONING = "reasoning"
    TEXT = "text"


@dataclass(frozen=True)
class CallObjects:
    """Calls as JSON: ``{"name": "f", "arguments": {...}}``, or a list of such objects.

    Attributes:
        name: key of the name.
        arguments: keys that the arguments may have.
        ignored: keys that are read and dropped.
        separator: character between several objects that are not in a list; "" for one object only.
        syntax: how values are written.
    """

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("id", "type")
    separator: str = ""
    syntax: Syntax = JSON


@dataclass(frozen=True)
class ArgumentsObject:
    """The arguments of one call as an object. The tool's name is the group ``name`` of the opening marker."""

    syntax: Syntax = JSON


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments between markers, as in ``<parameter=city>Paris</parameter>``.

    The tool's name is the group ``name`` of the region's opening marker. A value becomes what the tool's schema says.

    Attributes:
        open: regular expression of what begins an argument; its group ``key`` is the name of the argument.
        close: regular expression of what ends it. A model may leave it out before the next argument and at the end.
        reads_json: whether a value of which the schema does not say the type is read as JSON, and as a string if it is
            none; otherwise it is a string.
    """

    open: str
    close: str
    reads_json: bool = True

    def markers(self, end: str | None) -> tuple[str, ...]:
        """Return the expressions of what follows a value: the next argument, its own end, and the end of the call."""
        return (rf"\n?(?:{self.open})", self.close, *([] if end is None else [end]))


@dataclass(frozen=True)
class PythonCalls:
    """Calls as a Python list: ``[f(a="x", b=[1, True])]``. Nothing is evaluated."""


Calls = CallObjects | ArgumentsObject | TaggedArguments | PythonCalls


@dataclass(frozen=True)
class Region:
    """A part of a text between two markers. Markers are regular expressions (:mod:`.pattern`).

    Attributes:
        open: what begins the region. ``^`` matches at the beginning of an answer and after its reasoning. The group
            ``body``, at the end of the marker, belongs to the region too.
        close: what ends it; ``None`` for the end of the text.
        content: what is in it.
        join: text between this region and an earlier one of its kind, if it is passed on as text.
        end_text, begin_text: texts that end and begin it, for grammars that let a model write the region; "" if none is
            known.
    """

    open: str
    close: str | None
    content: Passage | Calls
    end_text: str = ""
    begin_text: str = ""
    join: str = ""

    @property
    def has_calls(self) -> bool:
        """Whether the region contains tool calls."""
        return not isinstance(self.content, Passage)

    @property
    def markers_if_begun(self) -> tuple[str, ...]:
        """Expressions of what may still open a region that has begun, as the first thing in it, and of what ends it."""
        return (f"^(?:{self.open})", *([] if self.close is None else [self.close]))


@dataclass(frozen=True)
class CallMarkup:
    """Text of a call in the model's own format, for grammars that force one.

    Attributes:
        before, after: markers around all calls.
        begin: text before a call's arguments; ``%s`` stands for the tool's name.
        end: text behind the arguments.
        separator: text between two calls; ``None`` if there can be only one.
        trigger: marker with which ``begin`` begins and that text never contains; "" if there is none.
    """

    begin: str
    end: str
    before: str = ""
    after: str = ""
    separator: str | None = ""
    trigger: str = ""


@dataclass(frozen=True)
class ParserSpec:
    """Markers of the parts of a model's output.

    Attributes:
        regions: what text is searched for; earlier ones are preferred.
        start_anchors: texts of which the last one in a prompt is where the model's answer begins. The part of an answer
            that is in the prompt, such as an opening ``<think>``, is behind it.
        starts_reasoning: whether an answer begins with reasoning even if nothing marks it.
        dropped: regular expressions of markers that are removed from text, such as the end of a turn.
        markup: how calls are forced; ``None`` if as a list in JSON.
        markers: the literal texts in the markers.
        short_ids: whether ids of calls are nine letters and digits, as Mistral's templates require.
        only_calls: whether calls are forced, so that there is no text beside them.
        drops_text: whether text outside the regions is dropped.
    """

    regions: tuple[Region, ...]
    start_anchors: tuple[str, ...]
    starts_reasoning: bool = False
    dropped: tuple[str, ...] = ()
    markup: CallMarkup | None = None
    markers: tuple[str, ...] = ()
    short_ids: bool = False
    only_calls: bool = False
    drops_text: bool = False

    @property
    def reasoning(self) -> Region | None:
        """The first region of reasoning, or ``None``."""
        return next((r for r in self.regions if r.content is Passage.REASONING), None)

    @property
    def has_calls(self) -> bool:
        """Whether it is known how tool calls are written."""
        return any(region.has_calls for region in self.regions)

    def without_calls(self) -> "ParserSpec":
        """Return how to read an answer without tool calls."""
        regions = tuple(region for region in self.regions if not region.has_calls)
        patterns = [pattern for region in regions for pattern in (region.open, region.close or "")]
        text = "".join((*patterns, *self.dropped)).replace("\\", "")
        return replace(self, regions=regions, markers=tuple(marker for marker in self.markers if marker in text))

    def special_markers(self, special_tokens: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ids of the markers that are special tokens, which are left out of text by default."""
        return tuple(special_tokens[marker] for marker in self.markers if marker in special_tokens)
