"""Answers to chats: whole, and as frames of a stream."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

import fastinfer
from fastinfer.outputs import CompletionOutput, RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.generation import Stream, outputs_of, usage, usage_of
from fastinfer.server.logprobs import chat_logprobs, prompt_logprobs
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.sse import DONE, frame
from fastinfer.server.state import ServerState

FINGERPRINT = f"fastinfer-{fastinfer.__version__}"


class ChatAnswer:
    """Writes the answer to one request.

    Args:
        server: the server.
        body: the request.
        model: the model's name in the answer.
        params: the sampling parameters.
    """

    def __init__(self, server: ServerState, body: ChatRequest, model: str, params: SamplingParams) -> None:
        self._server = server
        self._body = body
        self._params = params
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{body.request_id or secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer as one object."""
        answer = {
            **self._head,
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": usage_of([output]),
            "service_tier": "default",
        }
        return answer | self._prompt_fields(output)

    async def frames(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream; what one output of the engine brings is one item."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        chunks = _Chunks(self._head, usage_null=with_usage and not continuous)
        is_plain = not (self._body.logprobs or self._body.return_token_ids or continuous)
        ended: set[int] = set()
        num_tokens = 0
        outputs = outputs_of(self._server, streams, self._params, self._body.stream_interval or 1)
        async with contextlib.aclosing(outputs):
            is_first = True
            async for _, output in outputs:
                parts = []
                fields: dict[str, Any] = {}
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                counts = usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens)
                if continuous:
                    fields["usage"] = counts
                if is_first:
                    is_first = False
                    first = fields | self._prompt_fields(output)
                    delta = {"role": "assistant", "content": ""}
                    parts += [chunks.any(choice.index, delta, **first) for choice in output.outputs]
                for choice in output.outputs:
                    if choice.index in ended:
                        continue
                    if is_plain and choice.delta:
                        parts.append(chunks.text(choice.index, choice.delta))
                    elif not is_plain and (choice.delta or choice.token_ids):
                        delta = {"content": choice.delta}
                        parts.append(chunks.any(choice.index, delta, self._details(choice), **fields))
                    if choice.finish_reason is not None:
                        ended.add(choice.index)
                        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                        parts.append(chunks.any(choice.index, {}, end, **fields))
                if output.finished:
                    if with_usage:
                        parts.append(frame({**self._head, "choices": [], "usage": counts}))
                    parts.append(DONE)
                if parts:
                    yield b"".join(parts)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        } | self._details(completion)

    def _details(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return what a choice has about the tokens of an output."""
        details: dict[str, Any] = {}
        if completion.logprobs is not None:
            details["logprobs"] = chat_logprobs(
                completion.token_ids,
                completion.logprobs,
                self._body.top_logprobs or 0,
                bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            details["token_ids"] = completion.token_ids
        return details

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return what vLLM's extra fields ask about the prompt."""
        fields: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields


class _Chunks:
    """Writes chunks, those of plain text from constant bytes.

    Args:
        head: fields that all chunks have.
        usage_null: whether chunks have the field ``usage``, of which only the last one has a value.
    """

    def __init__(self, head: dict[str, Any], *, usage_null: bool) -> None:
        self._head = head
        self._extra: dict[str, Any] = {"usage": None} if usage_null else {}
        # {"id": ..., "system_fingerprint": ..., and the choice, up to its text.
        self._before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        end = b',"usage":null}\n\n' if usage_null else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}]' + end

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of text."""
        return b'%b%d,"delta":{"content":%b%b' % (self._before, index, orjson.dumps(text), self._after)

    def any(self, index: int, delta: dict[str, Any], details: dict[str, Any] | None = None, **fields: Any) -> bytes:
        """Return a chunk with further fields of the choice and of the chunk."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (details or {})
        return frame({**self._head, "choices": [choice], **self._extra, **fields})
