"""``/v1/chat/completions``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.server.chat_answer import ChatAnswer
from fastinfer.server.chat_run import start_chat
from fastinfer.server.errors import JSON
from fastinfer.server.protocol.base import parse
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    server = server_of(request)
    body = await parse(request, ChatRequest, server.config.body_timeout_s)
    run = await start_chat(request, body)
    answer = ChatAnswer(run)
    if body.stream:
        return server.stream(answer.frames())
    return JSON(await answer.whole(await run.output(request)))
