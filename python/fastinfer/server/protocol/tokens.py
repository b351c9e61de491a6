"""Requests of ``/tokenize`` and ``/detokenize``."""

from typing import Annotated, Any

from pydantic import Field

from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import ChatMessage, Tool


class TokenizeRequest(RequestModel):
    """A request to tokenise a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(RequestModel):
    """A request for the text of tokens."""

    model: str | None = None
    tokens: list[int]
