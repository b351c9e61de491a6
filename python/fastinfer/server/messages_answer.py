"""Answers of ``/v1/messages``: whole, and as named events of a stream."""

import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import from_json

from fastinfer.outputs import RequestOutput
from fastinfer.server.chat_run import ChatRun
from fastinfer.server.errors import APIError
from fastinfer.server.generation import outputs_of
from fastinfer.server.segments import Change, Segment, SegmentKind, Segments
from fastinfer.server.sse import named_frame

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_error(error: APIError) -> bytes:
    """Return the frame that ends a stream in which something failed."""
    return named_frame("error", error.body(anthropic=True))


class MessagesAnswer:
    """Writes the answer to one request.

    Args:
        run: the request in the engine.
    """

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._choice = run.choice()
        self._segments = Segments()

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer as one object."""
        [completion] = output.outputs
        self._segments.add(self._choice.events(completion, completion.text))
        content = [_block(segment, segment.text) for segment in self._segments.all]
        end = self._end(completion.stop_reason)
        return {**self._head(output, len(completion.token_ids)), "content": content, **end}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream; what one output of the engine brings is one item."""
        run, num_tokens, is_first = self._run, 0, True
        outputs = outputs_of(run.server, [run.stream], run.params)
        async with contextlib.aclosing(outputs):
            async for _, output, num_new in outputs:
                parts = []
                num_tokens += num_new
                if is_first:
                    is_first = False
                    start = {"type": "message_start", "message": self._head(output, num_tokens)}
                    parts += [named_frame("message_start", start), named_frame("ping", {"type": "ping"})]
                [completion] = output.outputs
                changes = self._segments.add(self._choice.events(completion, completion.delta))
                if output.finished:
                    changes += self._segments.end()
                parts += [_frame(*change) for change in changes]
                if output.finished:
                    usage = _usage(output, num_tokens)
                    delta = {"type": "message_delta", "delta": self._end(completion.stop_reason), "usage": usage}
                    parts += [
                        named_frame("message_delta", delta),
                        named_frame("message_stop", {"type": "message_stop"}),
                    ]
                if parts:
                    yield b"".join(parts)

    def _head(self, output: RequestOutput, num_tokens: int) -> dict[str, Any]:
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._run.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(output, num_tokens),
        }

    def _end(self, stop: int | str | None) -> dict[str, Any]:
        """Return why the message has ended."""
        if isinstance(stop, str) and not self._choice.ends_with_call:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        is_call = any(segment.kind is SegmentKind.CALL for segment in self._segments.all)
        reason = _STOP_REASONS[self._choice.finish_reason or "stop"]
        return {"stop_reason": "tool_use" if is_call and reason == "end_turn" else reason, "stop_sequence": None}


def _usage(output: RequestOutput, num_tokens: int) -> dict[str, int]:
    """Return Anthropic's counts, in which cached tokens are no input tokens."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_read_input_tokens": output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_tokens,
    }


def _block(segment: Segment, text: str) -> dict[str, Any]:
    match segment.kind:
        case SegmentKind.TEXT:
            return {"type": "text", "text": text, "citations": None}
        case SegmentKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case SegmentKind.CALL:
            return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": _arguments(text)}


def _frame(change: Change, segment: Segment, text: str) -> bytes:
    match change:
        case Change.BEGIN:
            return _event("content_block_start", segment, content_block=_block(segment, ""))
        case Change.END:
            return _event("content_block_stop", segment)
        case Change.MORE:
            name, field = {
                SegmentKind.TEXT: ("text_delta", "text"),
                SegmentKind.REASONING: ("thinking_delta", "thinking"),
                SegmentKind.CALL: ("input_json_delta", "partial_json"),
            }[segment.kind]
            return _event("content_block_delta", segment, delta={"type": name, field: text})


def _event(name: str, segment: Segment, **fields: Any) -> bytes:
    return named_frame(name, {"type": name, "index": segment.index, **fields})


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut off, those that are complete."""
    with contextlib.suppress(ValueError):
        parsed = from_json(text, allow_partial=True)
        if isinstance(parsed, dict):
            return parsed
    return {}
