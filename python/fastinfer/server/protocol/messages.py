"""Requests of ``/v1/messages``, Anthropic's interface, and what they are as chats."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from fastinfer.server.errors import APIError
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import MAX_TOOLS, ChatMessage, ChatRequest
from fastinfer.server.protocol.sampling import ShortText, StreamOptions

# A block of Claude Code's system prompt that has a hash of each request: no two prompts would share a prefix.
BILLING = "x-anthropic-billing-header"


class Block(RequestModel):
    """A block of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["Block"] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None  # prefixes are always cached
    citations: list[Any] | None = None
    caller: dict[str, Any] | None = None
    data: str | None = None
    source: Any = None


class AnthropicMessage(RequestModel):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(RequestModel):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestModel):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model reasons first. Its tokens are bounded by ``max_tokens`` alone."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class Metadata(RequestModel):
    """The caller's user."""

    user_id: ShortText | None = None


class CountTokensRequest(RequestModel):
    """A request for the number of tokens of a conversation."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None

    def chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: a block is of a kind that the model has not.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            blocks = [Block(type="text", text=self.system)] if isinstance(self.system, str) else self.system
            kept = [block for block in blocks if not (block.text or "").startswith(BILLING)]
            if kept:
                messages.append({"role": "system", "content": _text(kept, "system")})
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{index}].content")
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if not messages:
            raise APIError(400, "messages: expected at least one block, got none", param="messages")
        is_begun = messages[-1]["role"] == "assistant"
        chat: ChatRequest = ChatRequest.model_construct(
            model=self.model,
            messages=[ChatMessage.model_validate(message) for message in messages],
            continue_final_message=is_begun or None,
            **self._tools(),
            **fields,
        )
        return chat

    def _tools(self) -> dict[str, Any]:
        """Return the fields of a chat that say which tools there are."""
        if not self.tools:
            return {}
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in self.tools
        ]
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        named = {"type": "function", "function": {"name": choice.name}}
        kind = {"any": "required", "tool": named}.get(choice.type, choice.type)
        if choice.type == "tool" and choice.name is None:
            raise APIError(400, "tool_choice.name is missing", param="tool_choice")
        checked = ChatRequest.model_validate(
            {
                "messages": [{"role": "user", "content": ""}],
                "tools": [{"type": "function", "function": function} for function in functions],
                "tool_choice": kind,
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
            }
        )
        return {name: getattr(checked, name) for name in ("tools", "tool_choice", "parallel_tool_calls")}


class MessagesRequest(CountTokensRequest):
    """A request to answer a conversation."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None

    container: None = None
    context_management: None = Field(default=None, description="the whole conversation is kept")
    diagnostics: None = None
    inference_geo: None = None
    mcp_servers: None = Field(default=None, description="the client calls the tools")
    output_config: None = None

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: a block is of a kind that the model has not.
        """
        return self.chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def _messages(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """Return the chat messages of a message: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, reasoning = [], [], [], ""
    for index, block in enumerate(message.content):
        match block.type:
            case "text":
                texts.append(block)
            case "thinking" if message.role == "assistant":
                reasoning += block.thinking or ""
            case "redacted_thinking" if message.role == "assistant":
                pass  # of another model, which alone could read it
            case "tool_use" if message.role == "assistant":
                function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result" if message.role == "user":
                content = block.content or ""
                text = content if isinstance(content, str) else _text(content, f"{place}[{index}].content")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case _:
                raise APIError(
                    400, f"{place}[{index}]: blocks of the type {block.type!r} are not supported", param=place
                )
    if not (texts or calls or reasoning):
        return results
    chat: dict[str, Any] = {"role": message.role, "content": _text(texts, place)}
    if calls:
        chat["tool_calls"] = calls
    if reasoning:
        chat["reasoning_content"] = reasoning
    return [*results, chat]


def _text(blocks: list[Block], place: str) -> str:
    for index, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            raise APIError(400, f"{place}[{index}]: expected a text, got a block of type {block.type!r}", param=place)
    return "\n".join(block.text or "" for block in blocks)
