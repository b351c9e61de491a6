"""Answers to chats: whole, and as frames of a stream."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import fastinfer
from fastinfer.outputs import CompletionOutput, RequestOutput
from fastinfer.server.chat_run import ChatRun
from fastinfer.server.chunks import Chunks
from fastinfer.server.generation import TokenCounter, outputs_of
from fastinfer.server.logprobs import chat_logprobs, prompt_logprobs
from fastinfer.server.sse import DONE, frame

FINGERPRINT = f"fastinfer-{fastinfer.__version__}"


class ChatAnswer:
    """Writes the answer to one request.

    Args:
        run: the request in the engine.
    """

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._body = body = run.body
        self._choices = [run.choice() for _ in range(run.params.n)]
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{body.request_id or secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": run.model,
            "system_fingerprint": FINGERPRINT,
        }

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = [self._whole_choice(completion) for completion in output.outputs]
        counter = TokenCounter()
        counter.add(0, output, sum(len(completion.token_ids) for completion in output.outputs))
        counts = await self._usage(counter)
        answer = {**self._head, "choices": choices, "usage": counts, "service_tier": "default"}
        return answer | self._prompt_fields(output)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream; what one output of the engine brings is one item."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        chunks = Chunks(self._head, usage_null=with_usage and not continuous)
        has_details = bool(self._body.logprobs or self._body.return_token_ids)
        is_plain = self._run.plan.make_parser is None and not (has_details or continuous)
        counter = TokenCounter()
        interval = self._body.stream_interval or 1
        outputs = outputs_of(self._run.server, [self._run.stream], self._run.params, interval)
        async with contextlib.aclosing(outputs):
            async for _, output, num_new in outputs:
                parts: list[bytes] = []
                fields: dict[str, Any] = {}
                is_first = counter.add(0, output, num_new)
                if continuous:
                    fields["usage"] = counter.usage()
                if is_first:
                    first = fields | self._prompt_fields(output)
                    delta = {"role": "assistant", "content": ""}
                    parts += [chunks.any(completion.index, delta, **first) for completion in output.outputs]
                for completion in output.outputs:
                    choice, index = self._choices[completion.index], completion.index
                    if is_plain and completion.finish_reason is None:  # almost all outputs
                        if completion.delta:
                            parts.append(chunks.text(index, completion.delta))
                        continue
                    if choice.has_ended:
                        continue
                    deltas = choice.deltas(completion)
                    if has_details and completion.token_ids:
                        details = self._details(completion)
                        parts.append(chunks.any(index, deltas[0] if deltas else {"content": ""}, details, **fields))
                        deltas = deltas[1:]
                    for delta in deltas:
                        if continuous or "content" not in delta:
                            parts.append(chunks.any(index, delta, **fields))
                        else:
                            parts.append(chunks.text(index, delta["content"]))
                    if choice.has_ended:
                        end = {"finish_reason": choice.finish_reason, "stop_reason": completion.stop_reason}
                        parts.append(chunks.any(index, {}, end, **fields))
                if output.finished:
                    if with_usage:
                        counts = await self._usage(counter)
                        parts.append(frame({**self._head, "choices": [], "usage": counts}))
                    parts.append(DONE)
                if parts:
                    yield b"".join(parts)

    def _whole_choice(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[completion.index]
        return {
            "index": completion.index,
            "message": choice.message(completion),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
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

    async def _usage(self, counter: TokenCounter) -> dict[str, Any]:
        """Return the counts of the whole answer; the tokens of its reasoning are those of its text."""
        num_reasoning = await self._run.num_tokens("".join(choice.reasoning for choice in self._choices))
        return counter.usage(num_reasoning)
