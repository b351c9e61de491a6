"""``/v1/completions``."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.async_engine import AsyncEngine
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.completion_answer import CompletionAnswer
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import JSON, APIError
from fastinfer.server.generation import cache_salt, check_length, finish_all, request_options, start
from fastinfer.server.params import check_options, sampling_params
from fastinfer.server.protocol.base import parse
from fastinfer.server.protocol.completions import CompletionRequest
from fastinfer.server.state import server_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or several texts, at once or as a stream."""
    server = server_of(request)
    body = await parse(request, CompletionRequest, server.config.body_timeout_s)
    engine, model, adapter = server.model(body.model)
    check_options(body, engine)
    params = completion_params(body, engine)
    salt, special = cache_salt(request, body), body.add_special_tokens is not False
    prompts = await asyncio.gather(
        *(engine.prepare(prompt, cache_salt=salt, add_special_tokens=special) for prompt in body.prompts())
    )
    for prompt in prompts:
        check_length(engine, prompt, params)
    options = request_options(request, server, adapter, body.priority)
    streams = await start(request, engine, prompts, params, options)
    answer = CompletionAnswer(server, engine.tokenizer, body, model, params)
    if body.stream:
        return server.stream(answer.frames(streams))
    outputs = await unless_gone(request, finish_all(server, streams, params))
    return JSON(answer.whole(outputs))


def completion_params(body: CompletionRequest, engine: AsyncEngine) -> SamplingParams:
    """Return the sampling parameters of a completion.

    Raises:
        APIError: two fields contradict each other.
        RequestError: a field is out of range.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise APIError(400, "max_tokens must be at least 1 without echo, got 0", param="max_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise APIError(400, f"best_of must be n={body.n or 1} or absent, got {body.best_of}", param="best_of")
    fields: dict[str, Any] = {"max_tokens": max_tokens or 1, "logprobs": body.logprobs}
    params = sampling_params(body, engine.default_params, **fields)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        return sampling_params(body.model_copy(update={"prompt_logprobs": body.logprobs}), params, **fields)
    return params
