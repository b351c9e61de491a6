"""Requests of ``/v1/messages``, Anthropic's interface, and what they are as chats."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fastinfer.server.errors import APIError
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import MAX_BUDGET, MAX_TOOLS, Caller, ChatRequest, ToolName, conversation
from fastinfer.server.protocol.many import Items
from fastinfer.server.protocol.one_of import OneOf
from fastinfer.server.protocol.sampling import ShortText, StreamOptions, StructuredOutputs

# First line of Claude Code's system prompt, with a hash of each request: no two prompts would share a prefix.
BILLING = "x-anthropic-billing-header:"

CacheControl = dict[str, Any] | None  # prefixes are always cached


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class ImageSource(RequestModel):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/\w+$")]
    data: str


class ImageBlock(RequestModel):
    """An image."""

    type: Literal["image"]
    source: Annotated[ImageSource, OneOf("type")]
    cache_control: CacheControl = None


class ThinkingBlock(RequestModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """The reasoning of another model, which alone could read it."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(RequestModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Caller | None = None


Texts = Annotated[str | Items[Annotated[TextBlock, OneOf("type")]], OneOf("type")]


class ToolResultBlock(RequestModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | Items[Annotated[TextBlock | ImageBlock, OneOf("type")]], OneOf("type")] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat message of the result; templates have no other place for the fact that it is an error."""
        content: Any = self.content or ""
        error = "Error: " if self.is_error else ""
        if isinstance(content, str) or all(isinstance(block, TextBlock) for block in content):
            content = error + _text(content)
        else:
            content = [*([{"type": "text", "text": error}] if error else []), *map(_part, content)]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, OneOf("type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, OneOf("type")]


class AnthropicSystemMessage(RequestModel):
    """A message of the program."""

    role: Literal["system"]
    content: Texts

    def for_chat(self) -> list[dict[str, Any]]:
        """Return the chat messages of the message."""
        return [{"role": "system", "content": _text(self.content)}]


class AnthropicUserMessage(RequestModel):
    """A message of the user, perhaps with results of tools, which are messages of their own in chats."""

    role: Literal["user"]
    content: Annotated[str | Items[UserBlock], OneOf("type")]

    def for_chat(self) -> list[dict[str, Any]]:
        """Return the chat messages of the message."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        others = [block for block in self.content if not isinstance(block, ToolResultBlock)]
        messages = [block.for_chat() for block in results]
        return [*messages, {"role": "user", "content": list(map(_part, others))}] if others else messages


class AnthropicAssistantMessage(RequestModel):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Annotated[str | Items[AssistantBlock], OneOf("type")]

    def for_chat(self) -> list[dict[str, Any]]:
        """Return the chat messages of the message."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        reasoning = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        if not (texts or calls or reasoning):
            return []
        message = {"role": "assistant", "content": _text(texts), "tool_calls": calls or None}
        return [{**message, "reasoning_content": reasoning or None}]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    """Return a block as a part of a chat message."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    url = f"data:{block.source.media_type};base64,{block.source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class AnthropicTool(RequestModel):
    """A tool that the model may call."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: CacheControl = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come
    # Accepted where they ask for what the server does anyway.
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class FreeToolChoice(RequestModel):
    """Whether a tool must be called, whichever it is."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class AnthropicNamedToolChoice(RequestModel):
    """The choice of one tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Reasoning before the answer."""

    type: Literal["enabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class NoThinking(RequestModel):
    """An answer without reasoning."""

    type: Literal["disabled"]


class Metadata(RequestModel):
    """The caller's user."""

    user_id: ShortText | None = None


class OutputSchema(RequestModel):
    """A JSON schema that the text obeys."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Options of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[OutputSchema, OneOf("type")] | None = None


class CountTokensRequest(RequestModel):
    """A request for the number of tokens of a conversation."""

    renamed: ClassVar = {
        "prompt": "messages",
        "prompt_token_ids": "messages",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "structured_outputs": "output_config.format",
        "json": "output_config.format.schema",
        "tools[].function.name": "tools[].name",
        "tools[].function.parameters": "tools[].input_schema",
    }

    model: str
    messages: Annotated[
        Items[Annotated[AnthropicSystemMessage | AnthropicUserMessage | AnthropicAssistantMessage, OneOf("role")]],
        Field(min_length=1),
    ]
    system: Texts | None = None
    tools: Annotated[Items[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[FreeToolChoice | AnthropicNamedToolChoice, OneOf("type")] | None = None
    thinking: Annotated[Thinking | NoThinking, OneOf("type")] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None

    def chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: there is no text at all, or a tool must be called and there is none.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            given = [self.system] if isinstance(self.system, str) else [block.text for block in self.system]
            texts = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in given]
            kept = [text for text, whole in zip(texts, given, strict=True) if text or text == whole]
            if kept:
                messages.append({"role": "system", "content": "\n".join(kept)})
        for message in self.messages:
            messages += message.for_chat()
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = isinstance(self.thinking, Thinking)
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort  # thinking alone says whether to reason
        if self.output_config is not None and self.output_config.format is not None:
            fields["structured_outputs"] = StructuredOutputs(json=self.output_config.format.schema_)
        if isinstance(self.thinking, Thinking):
            fields["include_reasoning"] = self.thinking.display != "omitted"
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        if not messages:
            raise APIError(400, "messages: expected at least one block, got none", param="messages")
        is_begun = messages[-1]["role"] == "assistant"
        chat: ChatRequest = ChatRequest.model_construct(
            model=self.model,
            messages=conversation(messages),
            continue_final_message=is_begun or None,
            chat_template_kwargs=variables or None,
            **self._tools(),
            **fields,
        )
        return chat

    def _tools(self) -> dict[str, Any]:
        """Return the fields of a chat that say which tools there are."""
        if not self.tools:
            if self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
                raise APIError(400, "tool_choice needs tools", param="tool_choice")
            return {}
        functions = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            for tool in self.tools
        ]
        choice = self.tool_choice or FreeToolChoice(type="auto")
        kind: Any = "required" if choice.type == "any" else choice.type
        if isinstance(choice, AnthropicNamedToolChoice):
            kind = {"type": "function", "function": {"name": choice.name}}
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
    stop_sequences: Items[str] | None = None
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

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: see :meth:`chat`.
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
