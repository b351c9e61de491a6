"""Answers to completions: whole, and as frames of a stream."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from fastinfer.outputs import CompletionOutput, RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.chat_answer import FINGERPRINT
from fastinfer.server.generation import Stream, TokenCounter, outputs_of
from fastinfer.server.logprobs import CompletionLogprobs, prompt_logprobs
from fastinfer.server.protocol.completions import CompletionRequest
from fastinfer.server.sse import DONE, frame
from fastinfer.server.state import ServerState
from fastinfer.tokenizers.tokenizer import Tokenizer


class CompletionAnswer:
    """Writes the answer to one request, whose choices are numbered over all its prompts.

    Args:
        server: the server.
        tokenizer: the model's tokenizer.
        body: the request.
        model: the model's name in the answer.
        params: the sampling parameters.
    """

    def __init__(
        self,
        server: ServerState,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        model: str,
        params: SamplingParams,
    ) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._body = body
        self._params = params
        self._is_prompt_alone = body.max_tokens == 0  # the engine has drawn one token, which nobody asked for
        self._skip_special = params.skip_special_tokens
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{body.request_id or secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                choices.append(self._choice(number, output, completion, is_first=True))
        counter = TokenCounter()
        for number, output in enumerate(outputs):
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            counter.add(number, output, 0 if self._is_prompt_alone else num_tokens)
        return {**self._head, "choices": choices, "usage": counter.usage()}

    async def frames(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream; what one output of the engine brings is one item."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        head = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        tail = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}\n\n' if with_usage else b"}\n\n")
        body = self._body
        is_plain = not (body.logprobs is not None or body.return_token_ids or continuous or self._is_prompt_alone)
        ended: set[int] = set()
        counter = TokenCounter()
        outputs = outputs_of(self._server, streams, self._params, body.stream_interval or 1)
        async with contextlib.aclosing(outputs):
            async for number, output, num_new in outputs:
                parts = []
                is_first = counter.add(number, output, 0 if self._is_prompt_alone else num_new)
                extra = {"usage": counter.usage() if continuous else None} if with_usage or continuous else {}
                for completion in output.outputs:
                    index = number * self._params.n + completion.index
                    if index in ended:
                        continue
                    is_end = completion.finish_reason is not None
                    if is_end:
                        ended.add(index)
                    has_prompt = is_first and (body.echo or body.return_token_ids or body.prompt_logprobs is not None)
                    if is_plain and not is_end and not has_prompt:
                        if completion.delta:
                            text = orjson.dumps(completion.delta)
                            parts.append(b'%b%d,"text":%b%b' % (head, index, text, tail))
                    elif is_end or has_prompt or completion.delta or completion.token_ids:
                        choice = self._choice(number, output, completion, is_first=is_first)
                        parts.append(frame({**self._head, "choices": [choice], **extra}))
                if len(ended) == len(streams) * self._params.n and output.finished:
                    if with_usage:
                        parts.append(frame({**self._head, "choices": [], "usage": counter.usage()}))
                    parts.append(DONE)
                if parts:
                    yield b"".join(parts)

    def _choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        """Return a choice with the text of an output, which the prompt precedes in the first one if it is echoed."""
        body = self._body
        index = number * self._params.n + completion.index
        text = "" if self._is_prompt_alone else completion.text
        token_ids = [] if self._is_prompt_alone else completion.token_ids
        positions: list[Any] = list(completion.logprobs or [])[: len(token_ids)]
        texts = [self._tokenizer.token_bytes(token_id, self._skip_special) for token_id in token_ids]
        if body.echo and is_first:
            prompt = output.prompt_token_ids
            before = [self._tokenizer.token_bytes(token_id, self._skip_special) for token_id in prompt]
            text = b"".join(before).decode(errors="replace") + text
            token_ids, texts = prompt + token_ids, before + texts
            positions = [*(output.prompt_logprobs or []), *positions]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._is_prompt_alone else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.logprobs is not None:
            writer = self._logprobs.setdefault(
                index, CompletionLogprobs(body.logprobs, bool(body.return_tokens_as_token_ids))
            )
            choice["logprobs"] = writer.of(token_ids, positions, texts)
        if body.return_token_ids:
            choice["token_ids"] = [] if self._is_prompt_alone else completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and is_first and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice
