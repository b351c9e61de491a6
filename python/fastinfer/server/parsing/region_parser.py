"""The streaming parser of a model's output: reasoning, text and tool calls, as a :class:`ParserSpec` marks them."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastinfer.server.parsing.argument_types import ArgumentType
from fastinfer.server.parsing.call_readers import read_calls
from fastinfer.server.parsing.call_writer import CallWriter
from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from fastinfer.server.parsing.pattern_search import Match, PatternSearch
from fastinfer.server.parsing.spec import ParserSpec, Passage, Region, TaggedArguments
from fastinfer.server.parsing.value_reader import MalformedError, escape


class OutputParser:
    """Divides a model's output into reasoning, text and tool calls while it is generated.

    However the output is divided into pieces, the events are the same, apart from where the texts in them are divided.
    The work is linear in the output, and nothing in it raises an error: what begins like a call but is none comes out
    as text. If a call turns out to be malformed after its arguments have begun, they stay incomplete, so that they are
    no JSON, and the rest comes out as text.

    Args:
        spec: how the model marks the parts.
        begun: the part of the answer that is in the prompt, such as an opening ``<think>``, see :func:`begun_answer`;
            it causes no events.
        tools: the request's tools, as in OpenAI's API. With none of them, calls are not looked for. ``None``: calls are
            looked for, but the names and types of the tools are not known.
    """

    def __init__(self, spec: ParserSpec, begun: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._spec = spec
        self._regions = tuple(r for r in spec.regions if not r.has_calls or tools is None or tools)
        self._patterns = (*(region.open for region in self._regions), *spec.dropped)
        self._found: list[Event] = []
        self._calls = CallWriter(self._found.append, tools, spec.short_ids)
        self._passed: set[Region] = set()  # passages that have begun
        self._is_fresh = True  # only reasoning has come before
        reasoning = spec.reasoning if spec.starts_reasoning else None
        self._reader: _Reader = self._unmarked(reasoning) if reasoning else self._text(skips_blanks=False)
        self._feed(begun)
        self.finish()
        self._reader.restart()

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return isinstance(self._reader, _PassageReader) and self._reader.emit == self._emit_reasoning

    def push(self, delta_text: str) -> list[Event]:
        """Read more of the output, and return what is found in it."""
        self._feed(delta_text)
        return self._take()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the output, and return what was held back.

        Args:
            is_cut: whether the output was cut off. A call that has begun but has no name yet is then dropped.
        """
        self._reader.finish(is_cut)
        while self._reader.successor is not None:
            self._follow()
            self._reader.finish(is_cut)
        return self._take()

    def _feed(self, text: str) -> None:
        place = 0
        while place < len(text):
            place = self._reader.read(text, place)
            self._follow()

    def _follow(self) -> None:
        """Go on to the next reader, once one has ended."""
        while self._reader.successor is not None:
            self._reader, unread = self._reader.successor
            self._feed(unread)

    def _take(self) -> list[Event]:
        """Return the events since the last call, with neighbours of the same kind joined."""
        if len(self._found) < 2:
            only, self._found[:] = self._found[:], []
            return only
        events: list[Event] = []
        texts: list[str] = []

        def join() -> None:
            if len(texts) > 1:
                last = events[-1]
                assert not isinstance(last, ToolCallStart)
                events[-1] = (
                    ToolCallArguments(last.index, "".join(texts))
                    if isinstance(last, ToolCallArguments)
                    else type(last)("".join(texts))
                )

        for event in self._found:
            if not isinstance(event, ToolCallStart) and events and type(event) is type(events[-1]):
                texts.append(event.text)
                continue
            join()
            events.append(event)
            texts = [] if isinstance(event, ToolCallStart) else [event.text]
        join()
        self._found.clear()
        return events

    def _emit_text(self, text: str) -> None:
        if text and not self._spec.only_calls:
            self._is_fresh = False
            self._found.append(TextDelta(text))

    def _emit_outside(self, text: str) -> None:
        """Pass on text outside the regions."""
        if self._spec.drops_text:
            self._is_fresh = self._is_fresh and not text
        else:
            self._emit_text(text)

    def _emit_reasoning(self, text: str) -> None:
        self._found.append(ReasoningDelta(text))

    def _text(self, skips_blanks: bool = True) -> "_PassageReader":
        """Return a reader of the answer's text, up to the next region."""
        return _PassageReader(self._patterns, self._emit_outside, self._enter, skips_blanks, self._is_fresh)

    def _malformed(self) -> "_PassageReader":
        """Return a reader of what follows the beginning of something that is no call: text, up to the next region."""
        return _PassageReader(self._patterns, self._emit_text, self._enter, skips_blanks=False)

    def _enter(self, match: Match) -> "_Reader":
        """Return the reader of what follows an opening marker."""
        if match.pattern >= len(self._regions):
            return self._text()  # a dropped marker
        region = self._regions[match.pattern]
        name = match.groups.get("name", "").strip()
        if isinstance(region.content, Passage):
            return self._passage(region)
        if isinstance(region.content, TaggedArguments):
            return self._tagged(region, region.content, name, match.text)
        self._is_fresh = False
        calls = read_calls(region.content, self._calls, name, known_only=region.open.startswith("^"))
        body = match.groups.get("body", "")
        return _CallReader(
            calls,
            self._found,
            match.text[: len(match.text) - len(body)],
            body,
            self._emit_text,
            end=lambda: self._behind_calls(region),
            fail=self._malformed,
        )

    def _passage(self, region: Region) -> "_PassageReader":
        """Return a reader of a region of reasoning or text."""
        emit = self._emit_reasoning if region.content is Passage.REASONING else self._emit_text
        if region.join and region in self._passed:
            emit(region.join)
        self._passed.add(region)
        return _PassageReader((region.close,) if region.close else (), emit, lambda _: self._text())

    def _unmarked(self, region: Region) -> "_PassageReader":
        """Return a reader of reasoning that nothing has opened. The model may still do so, as the first thing in it."""

        def enter(match: Match) -> _Reader:
            if match.pattern == 0:
                return self._passage(region)
            self._passed.add(region)
            return self._text()

        return _PassageReader(region.markers_if_begun, self._emit_reasoning, enter, at_beginning=True)

    def _behind_calls(self, region: Region) -> "_PassageReader":
        """Return a reader of what follows a region's calls: the closing marker, or whatever the model adds."""
        if region.close is None:
            return self._text()
        last = len(self._patterns)

        def enter(match: Match) -> _Reader:
            return self._text() if match.pattern == last else self._enter(match)

        return _PassageReader((*self._patterns, region.close), self._emit_outside, enter)

    def _tagged(self, region: Region, content: TaggedArguments, name: str, marker: str) -> "_Reader":
        """Return a reader of arguments between tags."""
        self._is_fresh = False
        try:
            self._calls.start(name)
        except MalformedError:
            self._emit_text(marker)
            return self._malformed()
        self._calls.write("{")
        return self._between_arguments(_TaggedCall(name, content, content.markers(region.close)), separator="")

    def _between_arguments(self, call: "_TaggedCall", separator: str) -> "_Reader":
        """Return a reader up to the next argument, or up to the end of the call."""
        return _PassageReader(
            call.markers, self._emit_text, lambda match: self._behind_argument(call, separator, match)
        )

    def _behind_argument(self, call: "_TaggedCall", separator: str, match: Match) -> "_Reader":
        """Return the reader of what follows a marker within a call, see :meth:`TaggedArguments.markers`."""
        if match.pattern == 1:
            return self._between_arguments(call, separator)
        if match.pattern == 2:
            self._calls.write("}")
            return self._text()
        key = match.groups.get("key", "")
        self._calls.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        return self._argument(call, self._calls.argument_type(call.name, key))

    def _argument(self, call: "_TaggedCall", kind: ArgumentType) -> "_Reader":
        """Return a reader of one argument. Strings are passed on as they come, others once they are complete."""
        if kind.is_string or (kind.names is None and not call.content.reads_json):
            self._calls.write('"')

            def end_string(match: Match) -> _Reader:
                self._calls.write('"')
                return self._behind_argument(call, ", ", match)

            return _PassageReader(
                call.markers, lambda text: self._calls.write(escape(text)), end_string, skips_blanks=False
            )
        pieces: list[str] = []

        def end_value(match: Match) -> _Reader:
            self._calls.write(kind.to_json("".join(pieces)))
            return self._behind_argument(call, ", ", match)

        return _PassageReader(call.markers, pieces.append, end_value, skips_blanks=False)


@dataclass(frozen=True)
class _TaggedCall:
    """A call with arguments between tags.

    Attributes:
        name: the tool's name.
        content: how the arguments are written.
        markers: what ends a value.
    """

    name: str
    content: TaggedArguments
    markers: tuple[str, ...]


def begun_answer(spec: ParserSpec, prompt: str) -> str:
    """Return the part of the answer that is in the prompt.

    Args:
        spec: how the model marks the parts.
        prompt: the rendered prompt, or at least its last message.
    """
    ends = [place + len(anchor) for anchor in spec.start_anchors if (place := prompt.rfind(anchor)) >= 0]
    if ends:
        return prompt[max(ends) :]
    # A template without any of the anchors may still open the reasoning.
    last = prompt[-64:].rstrip()
    return next((marker for marker in spec.markers if last.endswith(marker)), "")


class _Reader(Protocol):
    """Reads a part of the output.

    Attributes:
        successor: once the part has ended, the reader that follows, and text that it must read first: at most as many
            characters as a search looks ahead.
    """

    successor: "tuple[_Reader, str] | None"

    def read(self, text: str, place: int) -> int:
        """Read ``text`` from ``place`` on, and return where the part ends there, or the length of the text."""

    def finish(self, is_cut: bool) -> None:
        """End the output, which may have been cut off."""

    def restart(self) -> None:
        """Go on after ``finish``: what was read before belongs to the prompt."""


_Enter = Callable[[Match], _Reader]


class _PassageReader:
    """Passes text on, up to a marker.

    Args:
        patterns: markers.
        emit: receives the text.
        enter: makes the reader that follows a marker.
        skips_blanks: whether white space at the beginning is dropped.
        at_beginning: whether ``^`` matches before any text.
    """

    def __init__(
        self,
        patterns: tuple[str, ...],
        emit: Callable[[str], None],
        enter: _Enter,
        skips_blanks: bool = True,
        at_beginning: bool = False,
    ) -> None:
        self.successor: tuple[_Reader, str] | None = None
        self._patterns = patterns
        self.emit = emit
        self._enter = enter
        self._skips_blanks = skips_blanks
        self._at_beginning = at_beginning
        self._search = PatternSearch(patterns, at_beginning)

    def read(self, text: str, place: int) -> int:
        place = self._search.read(text, place)
        self._pass_on()
        return place

    def finish(self, is_cut: bool) -> None:
        self._search.finish()
        self._pass_on()

    def restart(self) -> None:
        self._search = PatternSearch(self._patterns, self._at_beginning)

    def _pass_on(self) -> None:
        text = self._search.take()
        if self._skips_blanks:
            text = text.lstrip()
        if text:
            self._skips_blanks = False
            self._at_beginning = self._at_beginning and not text.strip()
            self.emit(text)
        if self._search.match is not None and self.successor is None:
            self.successor = (self._enter(self._search.match), self._search.rest)


class _CallReader:
    """Reads the calls of a region; if they are malformed, what was not passed on comes out as text.

    Args:
        calls: reads the calls.
        found: events of the parser, to which the calls are added.
        marker: the opening marker, without its part that belongs to the calls.
        body: that part.
        emit: receives text.
        end: makes the reader that follows the calls.
        fail: makes the reader that follows if they are malformed.
    """

    def __init__(
        self,
        calls: Generator[None, str, str],
        found: list[Event],
        marker: str,
        body: str,
        emit: Callable[[str], None],
        end: Callable[[], _Reader],
        fail: Callable[[], _Reader],
    ) -> None:
        self.successor: tuple[_Reader, str] | None = None
        self._calls = calls
        self._found = found
        self._is_marked = bool(marker.strip())
        self._kept = [marker]  # what was read since the last event
        self._has_begun = False
        self._emit = emit
        self._end = end
        self._fail = fail
        next(calls)
        self.read(body, 0)

    def read(self, text: str, place: int) -> int:
        for position in range(place, len(text)):
            num_found = len(self._found)
            try:
                self._calls.send(text[position])
            except StopIteration as end:
                self.successor = (self._end(), end.value)
                return position + 1
            except MalformedError:
                self._emit("".join(self._kept))
                self.successor = (self._fail(), text[position])
                return position + 1
            if len(self._found) > num_found:
                self._has_begun = True
                self._kept.clear()
            else:
                self._kept.append(text[position])
        return len(text)

    def finish(self, is_cut: bool) -> None:
        if not (self._has_begun or (is_cut and self._is_marked)):
            self._emit("".join(self._kept))
        self._kept.clear()
        self._has_begun = True

    def restart(self) -> None:
        """Go on: a call that a prompt has begun is completed."""
