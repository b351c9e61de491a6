"""``/v1/responses``: OpenAI's newer interface. Nothing is kept between requests."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.chat_run import start_chat
from fastinfer.server.errors import JSON, response_not_found
from fastinfer.server.generation import cache_salt
from fastinfer.server.protocol.base import convert, parse
from fastinfer.server.protocol.responses import CountInputRequest, ResponsesRequest
from fastinfer.server.responses_answer import ResponsesAnswer
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server = server_of(request)
    body = await parse(request, ResponsesRequest, server.config.body_timeout_s)
    run = await start_chat(request, await convert(request, body.as_chat))
    answer = ResponsesAnswer(run, body)
    if body.stream:
        return server.stream(answer.frames(), answer.failure)
    return JSON(await answer.whole(await run.output(request)))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation as the model would see it."""
    server = server_of(request)
    body = await parse(request, CountInputRequest, server.config.body_timeout_s)
    server.model(body.model)
    chat = await convert(request, body.chat)
    prompt = await chat_prompt(server, chat, cache_salt(request, chat))
    return JSON({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.get("/v1/responses/{id}")
@router.post("/v1/responses/{id}/cancel")
async def find_response(id: str) -> Response:
    """Say that there is no such response, because none are kept."""
    raise response_not_found(id)
