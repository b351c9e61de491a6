"""``/v1/messages``: Anthropic's interface."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.chat_run import start_chat
from fastinfer.server.errors import JSON
from fastinfer.server.generation import cache_salt
from fastinfer.server.messages_answer import MessagesAnswer, anthropic_error
from fastinfer.server.protocol.base import convert, parse
from fastinfer.server.protocol.messages import CountTokensRequest, MessagesRequest
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server = server_of(request)
    body = await parse(request, MessagesRequest, server.config.body_timeout_s)
    run = await start_chat(request, await convert(request, body.as_chat))
    answer = MessagesAnswer(run)
    if body.stream:
        return server.stream(answer.frames(), anthropic_error)
    return JSON(answer.whole(await run.output(request)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation as the model would see it."""
    server = server_of(request)
    body = await parse(request, CountTokensRequest, server.config.body_timeout_s)
    server.model(body.model)
    chat = await convert(request, body.chat)
    prompt = await chat_prompt(server, chat, cache_salt(request, chat))
    return JSON({"input_tokens": len(prompt.token_ids)})
