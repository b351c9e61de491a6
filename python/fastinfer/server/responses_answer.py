"""Answers of ``/v1/responses``: whole, and as numbered events of a stream."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastinfer.outputs import RequestOutput
from fastinfer.server.chat_run import ChatRun
from fastinfer.server.errors import APIError
from fastinfer.server.generation import TokenCounter, outputs_of
from fastinfer.server.protocol.responses import ResponsesRequest
from fastinfer.server.segments import Change, Segment, SegmentKind, Segments
from fastinfer.server.sse import named_frame


class ResponsesAnswer:
    """Writes the answer to one request.

    Args:
        run: the request in the engine.
        body: the request.
    """

    def __init__(self, run: ChatRun, body: ResponsesRequest) -> None:
        self._run = run
        self._body = body
        self._choice = run.choice()
        self._segments = Segments()
        self._counter = TokenCounter()
        self._next_number = 0
        self._id = secrets.token_hex(12)
        self._created = int(time.time())

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer as one object."""
        [completion] = output.outputs
        self._counter.add(0, output, len(completion.token_ids))
        self._segments.add(self._choice.events(completion, completion.text))
        return await self._ended()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream; what one output of the engine brings is one item."""
        run = self._run
        outputs = outputs_of(run.server, [run.stream], run.params)
        async with contextlib.aclosing(outputs):
            async for _, output, num_new in outputs:
                parts = []
                if self._counter.add(0, output, num_new):
                    begun = self._response("in_progress")
                    parts += [self._event("response.created", response=begun)]
                    parts += [self._event("response.in_progress", response=begun)]
                [completion] = output.outputs
                changes = self._segments.add(self._choice.events(completion, completion.delta))
                if output.finished:
                    changes += self._segments.end()
                for change in changes:
                    parts += self._frames_of(*change)
                if output.finished:
                    response = await self._ended()
                    parts.append(self._event(f"response.{response['status']}", response=response))
                if parts:
                    yield b"".join(parts)

    def failure(self, error: APIError) -> bytes:
        """Return the frames that end a stream in which something failed."""
        # The interface has a closed list of codes for the response.
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        report = self._event("error", code=error.code, message=error.message, param=error.param)
        return report + self._event("response.failed", response=response)

    async def _ended(self) -> dict[str, Any]:
        """Return the finished response."""
        is_cut = self._choice.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        counts = self._counter.usage(await self._run.num_tokens(self._choice.reasoning))
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }
        last = self._segments.all[-1:] if is_cut else []
        response["output"] = [
            self._item(segment, "incomplete" if segment in last else "completed") for segment in self._segments.all
        ]
        response["completed_at"] = None if is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response without output."""
        body, params = self._body, self._run.params
        form = None if body.text is None or body.text.format is None else body.text.format
        tools = [tool.model_dump() for tool in body.tools or []]
        choice = "auto" if body.tool_choice is None else body.tool_choice
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._run.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _frames_of(self, change: Change, segment: Segment, text: str) -> list[bytes]:
        """Return the frames of a change."""
        place: dict[str, Any] = {"item_id": self._item_id(segment), "output_index": segment.index}
        kind, part = _EVENTS[segment.kind], {**place, "content_index": 0}
        match change, segment.kind:
            case Change.MORE, SegmentKind.CALL:
                return [self._event(f"response.{kind}.delta", **place, delta=text)]
            case Change.MORE, _:
                return [self._event(f"response.{kind}.delta", **part, delta=text, **_logprobs(segment))]
            case Change.BEGIN, _:
                empty = Segment(segment.index, segment.kind, "", segment.call_id, segment.name)
                item = self._item(empty, "in_progress")
                if segment.kind is not SegmentKind.CALL:
                    item["content"] = []
                frames = [self._event("response.output_item.added", output_index=segment.index, item=item)]
                if segment.kind is not SegmentKind.CALL:
                    frames.append(self._event("response.content_part.added", **part, part=_part(empty)))
                return frames
            case _:
                done = {"arguments": segment.text, "name": segment.name, **place}
                if segment.kind is not SegmentKind.CALL:
                    done = {"text": segment.text, **part, **_logprobs(segment)}
                frames = [self._event(f"response.{kind}.done", **done)]
                if segment.kind is not SegmentKind.CALL:
                    frames.append(self._event("response.content_part.done", **part, part=_part(segment)))
                is_cut = self._choice.finish_reason == "length" and segment is self._segments.all[-1]
                item = self._item(segment, "incomplete" if is_cut else "completed")
                return [*frames, self._event("response.output_item.done", output_index=segment.index, item=item)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return named_frame(kind, {"type": kind, "sequence_number": number, **fields})

    def _item_id(self, segment: Segment) -> str:
        prefix = {SegmentKind.TEXT: "msg", SegmentKind.REASONING: "rs", SegmentKind.CALL: "fc"}[segment.kind]
        return f"{prefix}_{self._id}{segment.index:04}"

    def _item(self, segment: Segment, status: str) -> dict[str, Any]:
        """Return a part of the answer as an item of the output."""
        item: dict[str, Any] = {"id": self._item_id(segment), "status": status}
        match segment.kind:
            case SegmentKind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": [_part(segment)]}
            case SegmentKind.REASONING:
                return item | {"type": "reasoning", "summary": [], "content": [_part(segment)]}
            case SegmentKind.CALL:
                call = {"call_id": segment.call_id, "name": segment.name, "arguments": segment.text}
                return item | {"type": "function_call", **call}


_EVENTS = {
    SegmentKind.TEXT: "output_text",
    SegmentKind.REASONING: "reasoning_text",
    SegmentKind.CALL: "function_call_arguments",
}


def _part(segment: Segment) -> dict[str, Any]:
    if segment.kind is SegmentKind.REASONING:
        return {"type": "reasoning_text", "text": segment.text}
    return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}


def _logprobs(segment: Segment) -> dict[str, Any]:
    return {"logprobs": []} if segment.kind is SegmentKind.TEXT else {}
