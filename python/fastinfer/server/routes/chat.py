"""``/v1/chat/completions``."""

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
    refuse_tools(body)
    params = chat_params(body, engine)
    prompt = await chat_prompt(engine, body, cache_salt(request, body))
    check_length(engine, prompt, params, "messages")
    options = request_options(request, server, adapter, body.priority)
    streams = await start(engine, [prompt], params, options)
    answer = ChatAnswer(server, body, model, params)
    if body.stream:
        return server.stream(answer.frames(streams))
    [output] = await unless_gone(request, finish_all(server, streams, params))
    return JSON(answer.whole(output))


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


def refuse_tools(body: ChatRequest) -> None:
    """Refuse tools until the parser of tool calls is here.

    Raises:
        APIError: the model may call tools.
    """
    if body.tools and body.tool_choice != "none":
        raise APIError(400, "tools are not supported yet", param="tools")
