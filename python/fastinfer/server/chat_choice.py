"""One choice of a chat: its text, reasoning and tool calls as OpenAI writes them."""

import json
from typing import Any

from fastinfer.outputs import CompletionOutput
from fastinfer.server.parsing import OutputParser
from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class ChatChoice:
    """Reads the outputs of one completion.

    Args:
        parser: the parser of its text; ``None`` if everything is text.
        is_named: whether the request names the tool to call; such a choice ends with "stop", or with "length" if a
            stop string or a stop token has cut off the call.
        is_parallel: whether there may be several calls; otherwise those behind the first one are left out.
        keeps_reasoning: whether the answer contains the reasoning.

    Attributes:
        finish_reason: why it ended; ``None`` while it runs.
        reasoning: the text of the reasoning so far.
    """

    def __init__(
        self, parser: OutputParser | None, *, is_named: bool, is_parallel: bool, keeps_reasoning: bool
    ) -> None:
        self.finish_reason: str | None = None
        self.reasoning = ""
        self._parser = parser
        self._is_named = is_named
        self._is_parallel = is_parallel
        self._keeps_reasoning = keeps_reasoning
        self._call: list[str] | None = None  # pieces of the last call's arguments

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None

    @property
    def ends_with_call(self) -> bool:
        """Whether there are calls, of which the last one is complete."""
        if self._call is None:
            return False
        try:
            json.loads("".join(self._call))
        except (ValueError, RecursionError):
            return False
        return True

    def events(self, completion: CompletionOutput, text: str) -> list[Event]:
        """Read more text of the completion; if that has ended, ``finish_reason`` says why afterwards."""
        reason, stop = completion.finish_reason, completion.stop_reason
        if self._parser is None:
            self.finish_reason = reason
            return [TextDelta(text)] if text else []
        events = self._parser.push(text)
        if reason is not None:
            events = events + self._parser.finish(is_cut=reason != "stop" or stop is not None)
        self.reasoning += "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        kept = [event for event in events if self._is_kept(event)]
        for event in kept:
            if isinstance(event, ToolCallStart):
                self._call = []
            elif isinstance(event, ToolCallArguments) and self._call is not None:
                self._call.append(event.text)
        self.finish_reason = reason
        if reason == "stop" and self._call is not None:
            is_cut = stop is not None and not self.ends_with_call
            if self._is_named:
                self.finish_reason = "length" if is_cut else "stop"
            else:
                self.finish_reason = "stop" if is_cut else "tool_calls"
        return kept

    def _is_kept(self, event: Event) -> bool:
        """Return whether the client gets an event."""
        match event:
            case ReasoningDelta():
                return self._keeps_reasoning
            case ToolCallStart() | ToolCallArguments():
                return self._is_parallel or event.index == 0
            case _:
                return True

    def deltas(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the deltas of the chat's chunks that an output brings."""
        return [_delta(event) for event in self.events(completion, completion.delta)]

    def message(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the whole message of a finished completion."""
        text, reasoning, calls = "", "", []
        for event in self.events(completion, completion.text):
            match event:
                case TextDelta():
                    text += event.text
                case ReasoningDelta():
                    reasoning += event.text
                case ToolCallStart():
                    calls.append(_call(event))
                case ToolCallArguments():
                    calls[event.index]["function"]["arguments"] += event.text
        content = text if text or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case TextDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return {"reasoning_content": event.text}
        case ToolCallStart():
            return {"tool_calls": [{"index": event.index, **_call(event)}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _call(event: ToolCallStart) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
