"""Requests for text: their options, their outputs in order of arrival, and what is counted when they end."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypedDict

from starlette.requests import Request

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import PromptTooLongError, RequestError
from fastinfer.outputs import RequestOutput, merge
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.auth import tenant_of
from fastinfer.server.cache.response_cache import Question
from fastinfer.server.cache.streams import OutputSource, Recorder, Recording, Replay
from fastinfer.server.caching import begin_turn
from fastinfer.server.errors import ABORTED, ENGINE_DEAD, RETRY_FULL_S, RETRY_LOADING_S, APIError, unavailable
from fastinfer.server.protocol.embeddings import EmbeddingRequest, ScoreRequest
from fastinfer.server.protocol.sampling import SamplingFields
from fastinfer.server.record import record
from fastinfer.server.state import ServerState
from fastinfer.serving.prompt import PreparedPrompt
from fastinfer.structured_output import StructuredOutputsParams

LOG = logging.getLogger("fastinfer.server")

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 86_400.0

Stream = OutputSource


class RequestOptions(TypedDict):
    """Arguments of :meth:`AsyncEngine.generate` beside the prompt and the sampling parameters."""

    priority: int
    adapter: str | None
    timeout: float | None
    queue_timeout: float | None


def request_options(request: Request, server: ServerState, adapter: str | None, priority: int | None) -> RequestOptions:
    """Return a request's options; its time limit comes from the header ``X-Request-Timeout``, in seconds.

    Raises:
        APIError: the header is not a number of seconds, or the priority is an administrator's.
    """
    if priority is not None and priority < 0 and not request.scope.get("is_admin"):
        message = f"priority must be at least 0 without an administrator's key, got {priority}"
        raise APIError(400, message, param="priority")
    timeout = server.config.request_timeout_s
    if (given := request.headers.get(TIMEOUT_HEADER)) is not None:
        try:
            timeout = float(given)
        except ValueError:
            timeout = math.nan
        if not 0 < timeout <= MAX_TIMEOUT_S:
            raise APIError(400, f"X-Request-Timeout must be a number of seconds in (0, {MAX_TIMEOUT_S:g}]")
    return {
        "priority": priority or 0,
        "adapter": adapter,
        "timeout": timeout,
        "queue_timeout": server.config.queue_timeout_s,
    }


def cache_salt(request: Request, body: SamplingFields | EmbeddingRequest | ScoreRequest) -> str:
    """Return the salt of a request's cached prefixes.

    Tenants share none: from the time of an answer one could tell what another one has asked (CVE-2025-46570).
    """
    salt = body.cache_salt or ""
    tenant = tenant_of(request)
    return f"{tenant}/{salt}" if tenant else salt


def rest_of(options: RequestOptions, seconds: float) -> RequestOptions:
    """Return a request's options after it has waited outside the engine.

    Raises:
        APIError: a time limit is over.
    """
    timeout, queue_timeout = options["timeout"], options["queue_timeout"]
    if queue_timeout is not None and (queue_timeout := queue_timeout - seconds) <= 0:
        raise _queue_timeout()
    if timeout is not None and (timeout := timeout - seconds) <= 0:
        raise _timeout()
    return {**options, "timeout": timeout, "queue_timeout": queue_timeout}


def _queue_timeout() -> APIError:
    return unavailable("the request has waited for too long", RETRY_FULL_S, "queue_timeout")


def _timeout() -> APIError:
    # Another attempt would take as long.
    headers = {"X-Should-Retry": "false"}
    return APIError(504, "the request did not end within its time limit", code="timeout", headers=headers)


def check_length(engine: AsyncEngine, prompt: PreparedPrompt, params: SamplingParams) -> None:
    """Refuse a prompt that is too long before its request is planned.

    Raises:
        PromptTooLongError: there is no room for a generated token.
    """
    length, limit = len(prompt.token_ids), engine.max_model_len
    if params.truncate_prompt_tokens is None and length >= limit:
        raise PromptTooLongError(f"prompt must leave one of these to be generated, got {length}", limit)


async def compile_constraint(engine: AsyncEngine, constraint: StructuredOutputsParams) -> None:
    """Compile a grammar ahead of its request.

    Raises:
        APIError, RequestError: the grammar cannot be enforced.
    """
    try:
        await engine.compile(constraint)
    except RequestError as error:
        raise _grammar_error(str(error)) or error from None


def _grammar_error(message: str) -> APIError | None:
    """Return the error of a grammar that cannot be compiled or followed; ``None`` if something else has failed."""
    return APIError(400, message, param="structured_outputs") if message.startswith("structured output") else None


async def start(
    request: Request,
    engine: AsyncEngine,
    prompts: Sequence[PreparedPrompt],
    params: SamplingParams,
    options: RequestOptions,
    question: Question | None = None,
) -> list[Stream]:
    """Find the answers to prompts in the response cache, or queue one request per prompt; all of them or none.

    Args:
        request: the HTTP request.
        engine: the engine.
        prompts: the prompts.
        params: their sampling parameters.
        options: further arguments of the engine.
        question: the last user text, if the answer to a similar one will do.

    Raises:
        FastinferError, UnavailableError: a request is refused.
    """
    record().params = params
    adapter = options["adapter"]
    digest = adapter and engine.adapter_digest(adapter)
    limits = [limit for limit in (options["timeout"], options["queue_timeout"]) if limit is not None]
    begin = time.monotonic()
    turn = await begin_turn(request, engine, prompts, params, adapter, question, min(limits, default=None))
    if turn is None:
        return await _queue(engine, prompts, params, options)
    if turn.outputs is not None:
        return [Replay(output) for output in turn.outputs]
    try:
        options = rest_of(options, time.monotonic() - begin)
        streams = await _queue(engine, prompts, params, options)
    except BaseException:
        turn.leave()
        raise
    # From here on the adapter is in use and stays what it is; before, another one may have got its name.
    if not turn.writes or (adapter and engine.adapter_digest(adapter) != digest):
        turn.leave()
        return streams
    recorder = Recorder(turn, len(streams))
    return [Recording(stream, recorder, number) for number, stream in enumerate(streams)]


async def _queue(
    engine: AsyncEngine, prompts: Sequence[PreparedPrompt], params: SamplingParams, options: RequestOptions
) -> list[Stream]:
    if params.structured_outputs is not None:
        await compile_constraint(engine, params.structured_outputs)
    streams = []
    try:
        for prompt in prompts:
            streams.append(engine.generate(prompt, params, **options))
        for stream in streams:
            await stream.accepted()
    except BaseException:
        for stream in streams:
            stream.abandon()
        raise
    return [*streams]


async def finish_all(server: ServerState, streams: Sequence[Stream], params: SamplingParams) -> list[RequestOutput]:
    """Wait for the final outputs of requests that have no others.

    Raises:
        APIError: a request has failed.
    """
    try:
        outputs = [await anext(stream) for stream in streams]
        for output in outputs:
            count(server, output, params, sum(len(completion.token_ids) for completion in output.outputs))
            check(server, output)
        return outputs
    finally:
        for stream in streams:
            stream.abandon()


async def outputs_of(
    server: ServerState, streams: Sequence[Stream], params: SamplingParams, interval: int = 1
) -> AsyncGenerator[tuple[int, RequestOutput, int], None]:
    """Yield the outputs of requests as they come, each with the request's number and that of its new tokens.

    Args:
        server: the server, whose metrics count.
        streams: the requests.
        params: their parameters.
        interval: smallest number of tokens of an output, except the first and the last one.

    Raises:
        APIError: a request has failed.
    """
    source = _numbered(streams[0]) if len(streams) == 1 else _merged(streams)
    pending: dict[int, RequestOutput] = {}
    num_tokens = [0] * len(streams)
    last_time = [0.0] * len(streams)
    latency = server.metrics.inter_token_latency
    async with contextlib.aclosing(source):
        async for index, new in source:
            output = merge(pending.pop(index), new) if index in pending else new
            num_new = sum([len(completion.token_ids) for completion in output.outputs])
            if num_new < interval and not output.finished and num_tokens[index]:
                pending[index] = output
                continue
            now = time.perf_counter()
            if num_tokens[index] and num_new:
                latency.observe((now - last_time[index]) / num_new)
            num_tokens[index] += num_new
            last_time[index] = now
            if output.finished:
                count(server, output, params, num_tokens[index])
                check(server, output)
            yield index, output, num_new


def check(server: ServerState, output: RequestOutput) -> None:
    """Check the last output of a request.

    Raises:
        APIError: it ran out of time, was aborted, or failed.
    """
    engine = server.host.loaded
    assert engine is not None
    for completion in output.outputs:
        check_end(engine, completion.finish_reason, completion.stop_reason)


def check_end(engine: AsyncEngine, finish_reason: str | None, stop_reason: int | str | None) -> None:
    """Check why a request has ended.

    Args:
        engine: the engine that has run it.
        finish_reason, stop_reason: what its last output says.

    Raises:
        APIError: it ran out of time, was aborted, or failed.
    """
    match finish_reason:
        case "stop" | "length":
            return
        case "timeout" if stop_reason == "queue_timeout":
            raise _queue_timeout()
        case "timeout":
            raise _timeout()
        case "abort":
            raise unavailable("the server has ended the request", RETRY_FULL_S, ABORTED)
        case _:
            raise _failure(engine, str(stop_reason))


def count(server: ServerState, output: RequestOutput, params: SamplingParams, num_tokens: int) -> None:
    """Count a request that has ended, unless its answer comes from the cache: the engine has not seen it."""
    record().add(output, num_tokens)
    if record().is_replayed:
        return
    reasons = {completion.finish_reason or "" for completion in output.outputs}
    server.metrics.finish(output.metrics, params, len(output.prompt_token_ids), num_tokens, reasons)


class TokenCounter:
    """Counts the tokens of an answer, which may have several prompts.

    Attributes:
        num_tokens: generated tokens.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._seen: set[int] = set()

    def add(self, number: int, output: RequestOutput, num_new: int) -> bool:
        """Count an output; returns whether it is the first one of its prompt."""
        self.num_tokens += num_new
        if number in self._seen:
            return False
        self._seen.add(number)
        self._num_prompt_tokens += len(output.prompt_token_ids)
        self._num_cached_tokens += output.num_cached_tokens
        return True

    def usage(self, num_reasoning: int = 0) -> dict[str, Any]:
        """Return OpenAI's counts.

        Args:
            num_reasoning: tokens of the reasoning's text, which may be more than those that it was generated with.
        """
        num_reasoning = min(num_reasoning, self.num_tokens)
        return usage(self._num_prompt_tokens, self.num_tokens, self._num_cached_tokens, num_reasoning)


def usage(num_prompt_tokens: int, num_tokens: int, num_cached: int, num_reasoning: int = 0) -> dict[str, Any]:
    """Return OpenAI's counts of tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _failure(engine: AsyncEngine, reason: str) -> APIError:
    """Return the answer to a request that failed while it ran."""
    if (error := _grammar_error(reason)) is not None:
        return error
    LOG.error("a request failed: %s", reason)
    if engine.health().is_dead:
        message = "the engine has died, and the request with it; the server's log has the details"
        return unavailable(message, RETRY_LOADING_S, ENGINE_DEAD)
    return APIError(500, "the request failed while it was running; the server's log has the details")


async def _numbered(stream: Stream) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with contextlib.aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several requests as they come."""
    # Outputs wait in the streams, which merge them, rather than here.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue(1)

    async def read(index: int, stream: Stream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))

    readers = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_running = len(streams)
        while num_running:
            index, output = await queue.get()
            if isinstance(output, BaseException):
                raise output
            num_running -= output.finished
            yield index, output
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
