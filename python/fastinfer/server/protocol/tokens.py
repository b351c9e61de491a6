"""Requests of ``/tokenize`` and ``/detokenize``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import ChatMessage, ChatRequest, Tool
from fastinfer.server.protocol.many import Items


class TokenizeRequest(RequestModel):
    """A request to tokenise a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[Tool] | None = None

    def misplaced(self) -> list[str]:
        """Return the names of given fields that are for a conversation where there is a prompt, or the reverse."""
        if self.prompt is None:
            return ["add_special_tokens"] if self.add_special_tokens else []  # the template writes them
        names = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return [name for name in names if getattr(self, name) is not None]

    def field_names(self) -> dict[str, str]:
        """Return the request's names of fields by the names that errors have."""
        names = super().field_names()
        return names if self.messages is None else {**names, **ChatRequest.renamed}


class DetokenizeRequest(RequestModel):
    """A request for the text of tokens."""

    renamed: ClassVar = {"token_ids": "tokens"}

    model: str | None = None
    tokens: Items[int]
