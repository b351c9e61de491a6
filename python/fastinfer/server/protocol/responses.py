"""Requests of ``/v1/responses``, and what they are as chats."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fastinfer.server.errors import APIError
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import MAX_TOOLS, ChatMessage, ChatRequest
from fastinfer.server.protocol.sampling import ShortText, StreamOptions


class Part(RequestModel):
    """A part of a content; which fields it has depends on its type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    detail: str | None = None
    image_url: str | None = None
    file_id: str | None = None


class Item(RequestModel):
    """An item of the conversation; which fields it has depends on its type."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    phase: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class ResponseTool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolName(RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    """A constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestModel):
    """Options of the reasoning, which is returned as it is and not summarised."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = Field(default=None, description="use summary")


class CountInputRequest(RequestModel):
    """A request for the number of tokens of a conversation."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = Field(default=None, description="responses are not kept; send the whole conversation")
    conversation: None = Field(default=None, description="responses are not kept; send the whole conversation")

    def chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: an item is of a kind that the model has not.
            ValidationError: a tool is not valid.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _messages(self.input)
        effort = None if self.reasoning is None else self.reasoning.effort
        chat: ChatRequest = ChatRequest.model_construct(
            model=self.model,
            messages=[ChatMessage.model_validate(message) for message in messages],
            reasoning_effort=effort,
            **self._tools(),
            **fields,
        )
        return chat

    def _tools(self) -> dict[str, Any]:
        """Return the fields of a chat that say which tools there are."""
        if not self.tools:
            return {}
        choice: Any = self.tool_choice
        if isinstance(choice, ToolName):
            choice = {"type": "function", "function": {"name": choice.name}}
        checked = ChatRequest.model_validate(
            {
                "messages": [{"role": "user", "content": ""}],
                "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )
        return {name: getattr(checked, name) for name in ("tools", "tool_choice", "parallel_tool_calls")}


class ResponsesRequest(CountInputRequest):
    """A request to answer a conversation, which is not kept."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Reasoning is returned in the clear anyway.
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: Literal[0] | None = None

    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    metadata: dict[str, str] | None = None

    context_management: None = Field(default=None, description="the whole conversation is kept")
    max_tool_calls: None = Field(default=None, description="the client calls the tools")
    moderation: None = None
    prompt: None = Field(default=None, description="there are no stored prompts")
    prompt_cache_options: None = Field(default=None, description="prefixes are always cached")

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError, ValidationError: see :meth:`chat`.
        """
        fields: dict[str, Any] = {}
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_schema":
            schema = {"name": form.name, "schema": form.schema_}
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        elif form is not None:
            fields["response_format"] = {"type": form.type}
        if fields:
            minimal = {"messages": [{"role": "user", "content": ""}], **fields}
            fields["response_format"] = ChatRequest.model_validate(minimal).response_format
        return self.chat(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            stream_options=self.stream_options,
            **fields,
        )


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Return the chat messages of items: reasoning and calls belong to the assistant's message beside them."""
    messages: list[dict[str, Any]] = []

    def answer(field: str) -> dict[str, Any]:
        """Return the assistant's message to which a field may be added."""
        if not messages or messages[-1]["role"] != "assistant" or field in messages[-1]:
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for index, item in enumerate(items):
        place = f"input[{index}]"
        match item.type:
            case "message" if item.role == "assistant" and messages and messages[-1].get("content", "") is None:
                messages[-1]["content"] = _text(item.content, place)
            case "message" if item.role is not None:
                messages.append({"role": item.role, "content": _text(item.content, place)})
            case "function_call":
                call = {"name": item.name or "", "arguments": item.arguments or ""}
                message = answer("")
                message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
            case "function_call_output":
                output = _text(item.output, place)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case "reasoning":
                text = "\n".join(part.text or "" for part in item.content or [] if isinstance(part, Part))
                if text:
                    messages.append({"role": "assistant", "content": None, "reasoning_content": text})
            case _:
                raise APIError(400, f"{place}: items of the type {item.type!r} are not supported", param=place)
    return messages


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            raise APIError(400, f"{place}: expected a text, got a part of type {part.type!r}", param=place)
    return "\n".join(part.text or "" for part in content)
