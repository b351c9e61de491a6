"""The prompt of a chat, from the messages and the fields that choose how the template renders them."""

import asyncio
from typing import Any

from fastinfer.server.errors import APIError
from fastinfer.server.protocol.chat import RESERVED_NAMES, ChatRequest
from fastinfer.server.state import ServerState
from fastinfer.server.tool_prompt import with_tools
from fastinfer.serving.prompt import PreparedPrompt


async def chat_prompt(server: ServerState, body: ChatRequest, salt: str) -> PreparedPrompt:
    """Render and tokenise the conversation of a request.

    Args:
        server: the server, whose model has the template.
        body: the request.
        salt: salt of the cached prefixes.

    Raises:
        APIError: two fields contradict each other, or ``chat_template_kwargs`` replaces something of the renderer.
        RequestError: the template refuses the messages, or the prompt is much too long.
        UnsupportedModelError: the model has no template.
    """
    engine = server.host.engine
    messages = [message.for_template() for message in body.messages]
    variables = template_variables(body)
    if server.output_format.is_generic:
        tools = variables.pop("tools", [])
        messages = await asyncio.to_thread(with_tools, messages, tools, engine.tokenizer.chat_template or "")
    return await engine.prepare_chat(
        messages,
        template_variables=variables,
        cache_salt=salt,
        continue_final_message=bool(body.continue_final_message),
    )


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the template beside the messages.

    Raises:
        APIError: see :func:`chat_prompt`.
    """
    variables = dict(body.chat_template_kwargs or {})
    if replaced := sorted(variables.keys() & RESERVED_NAMES):
        raise APIError(400, f"chat_template_kwargs must not have {replaced[0]}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        # Templates know one of the two: whether to think, or how much.
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
        if body.reasoning_effort != "none":
            variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.offered_tools:
        variables["tools"] = [tool.for_model() for tool in body.offered_tools]
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.continue_final_message and body.add_generation_prompt:
        raise APIError(
            400, "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    variables["add_generation_prompt"] = body.add_generation_prompt is not False and not body.continue_final_message
    return variables
