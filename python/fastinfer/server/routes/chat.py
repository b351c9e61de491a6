"""``/v1/chat/completions``."""

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.async_engine import AsyncEngine
from fastinfer.sampling_params import SamplingParams
from fastinfer.server.chat_answer import ChatAnswer
from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import JSON, APIError
from fastinfer.server.generation import cache_salt, check_length, finish_all, request_options, start
from fastinfer.server.output_plan import OutputPlan, plan_output
from fastinfer.server.params import check_streaming, sampling_params
from fastinfer.server.protocol.base import parse
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server = server_of(request)
    body = await parse(request, ChatRequest, server.config.body_timeout_s)
    engine, model, adapter = server.model(body.model)
    check_streaming(body)
    params = chat_params(body, engine)
    prompt = await chat_prompt(engine, body, cache_salt(request, body))
    check_length(engine, prompt, params, "messages")
    plan = plan_output(body, engine, prompt)
    params = apply(plan, params)
    options = request_options(request, server, adapter, body.priority)
    streams = await start(engine, [prompt], params, options)
    answer = ChatAnswer(server, engine.tokenizer, body, model, params, plan)
    if body.stream:
        return server.stream(answer.frames(streams))
    [output] = await unless_gone(request, finish_all(server, streams, params))
    return JSON(await answer.whole(output))


def apply(plan: OutputPlan, params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters with what a plan needs.

    Raises:
        APIError: the request constrains the text and forces tool calls at the same time.
    """
    if plan.make_parser is not None:  # the marks of reasoning and tool calls may be control tokens
        params = replace(params, skip_special_tokens=False)
    if plan.constraint is None:
        return params
    if params.structured_outputs is not None:
        raise APIError(400, "tool_choice and a format of the text exclude each other", param="tool_choice")
    return replace(params, structured_outputs=plan.constraint)


def chat_params(body: ChatRequest, engine: AsyncEngine) -> SamplingParams:
    """Return the sampling parameters of a chat. Without a limit the answer may be as long as the context allows.

    Raises:
        APIError: two fields contradict each other.
        RequestError: a field is out of range.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, engine.default_params, max_tokens=max_tokens, logprobs=logprobs)
