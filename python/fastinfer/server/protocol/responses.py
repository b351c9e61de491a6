"""Requests of ``/v1/responses``, and what they are as chats."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from fastinfer.server.errors import APIError
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import MAX_TOOLS, Arguments, Caller, ChatRequest, ToolName, conversation
from fastinfer.server.protocol.many import Entries, Items
from fastinfer.server.protocol.one_of import OneOf
from fastinfer.server.protocol.sampling import JSONSchema, JSONSchemaFormat, PlainFormat, ShortText, StreamOptions


class InputText(RequestModel):
    """A text of the user or of a tool."""

    type: Literal["input_text", "text"]
    text: str


class InputImage(RequestModel):
    """An image of the user or of a tool, as a data: URI."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class OutputText(RequestModel):
    """A text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # the openai package's own reading of the text, which it sends back


class ReasoningText(RequestModel):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


Content = Annotated[str | Items[Annotated[InputText | OutputText | InputImage, OneOf("type")]], OneOf("type")]


class ItemModel(RequestModel):
    """Base of the items. Names and states of earlier items come back with them, and have no effect."""

    id: str | None = None
    status: str | None = None


class MessageItem(ItemModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None

    def model_post_init(self, _: Any) -> None:
        """Check that an answer has no images."""
        if self.role == "assistant" and not isinstance(self.content, str):
            for index, part in enumerate(self.content):
                if isinstance(part, InputImage):
                    raise PydanticCustomError(
                        "image", "expected a text in content[{index}] of an answer, got an image", {"index": index}
                    )


class CallItem(ItemModel):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = ""
    parsed_arguments: Any = None  # the openai package's own reading of the arguments
    caller: Caller | None = None


class OutputItem(ItemModel):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    caller: Caller | None = None


class SummaryText(RequestModel):
    """A part of a summary of the reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(ItemModel):
    """The reasoning of an earlier answer. This server's is in ``content``; another one's may be a summary alone."""

    type: Literal["reasoning"]
    content: Items[Annotated[ReasoningText, OneOf("type")]] | None = None
    summary: Items[Annotated[SummaryText, OneOf("type")]] | None = None
    encrypted_content: None = None


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, OneOf("type", default="message")]


class ResponseTool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class ToolChoiceAllowed(RequestModel):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | ToolChoiceAllowed, OneOf("type")]


class TextSchema(JSONSchema):
    """A constraint on the text by a JSON schema."""

    type: Literal["json_schema"]


class TextOptions(RequestModel):
    """Options of the text."""

    format: Annotated[PlainFormat | TextSchema, OneOf("type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestModel):
    """Options of the reasoning, which is returned as it is and not summarised."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = Field(default=None, description="use summary")


class CountInputRequest(RequestModel):
    """A request for the number of tokens of a conversation."""

    renamed: ClassVar = {
        "prompt": "input",
        "prompt_token_ids": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
        "json": "text.format.schema",
        "tools[].function.name": "tools[].name",
        "tools[].function.parameters": "tools[].parameters",
    }

    model: str | None = None
    input: Annotated[str | Annotated[Items[Item], Field(min_length=1)], OneOf("type")]
    instructions: str | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = Field(default=None, description="responses are not kept; send the whole conversation")
    conversation: None = Field(default=None, description="responses are not kept; send the whole conversation")

    def chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: a tool must be called, and there is none.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _messages(self.input)
        effort = None if self.reasoning is None else self.reasoning.effort
        chat: ChatRequest = ChatRequest.model_construct(
            model=self.model,
            messages=conversation(messages),
            reasoning_effort=effort,
            **self._tools(),
            **fields,
        )
        return chat

    def _tools(self) -> dict[str, Any]:
        """Return the fields of a chat that say which tools there are."""
        choice: Any = self.tool_choice
        if not self.tools:
            if choice not in (None, "none", "auto"):
                raise APIError(400, "tool_choice needs tools", param="tool_choice")
            return {}
        if isinstance(choice, NamedTool):
            choice = _named(choice)
        elif isinstance(choice, ToolChoiceAllowed):
            allowed = {"mode": choice.mode, "tools": list(map(_named, choice.tools))}
            choice = {"type": choice.type, "allowed_tools": allowed}
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

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Reasoning is returned in the clear anyway.
    include: Items[Literal["reasoning.encrypted_content"]] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: Literal[0] | None = None

    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    metadata: Entries[str] | None = None

    context_management: None = Field(default=None, description="the whole conversation is kept")
    max_tool_calls: None = Field(default=None, description="the client calls the tools")
    moderation: None = None
    prompt: None = Field(default=None, description="there are no stored prompts")
    prompt_cache_options: None = Field(default=None, description="prefixes are always cached")

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat.

        Raises:
            APIError: see :meth:`chat`.
        """
        form: Any = None if self.text is None else self.text.format
        if isinstance(form, TextSchema):
            form = JSONSchemaFormat(type="json_schema", json_schema=form)
        return self.chat(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            stream_options=self.stream_options,
            response_format=form,
        )


def _named(tool: NamedTool) -> dict[str, Any]:
    """Return the choice of a tool as chats have it."""
    return {"type": "function", "function": {"name": tool.name}}


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Return the chat messages of items: reasoning and calls belong to the assistant's message beside them."""
    messages: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        """Return the assistant's message to which a call may be added."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for item in items:
        match item:
            case MessageItem(role="assistant") if messages and messages[-1].get("content", "") is None:
                messages[-1]["content"] = _text(item.content)
            case MessageItem():
                messages.append({"role": item.role, "content": _parts(item.content)})
            case CallItem():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                answer().setdefault("tool_calls", []).append(call)
            case OutputItem():
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
                messages.append({**result, "name": item.name})
            case ReasoningItem():
                text = _text(item.content or item.summary or "")
                if text:
                    messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    return messages


def _parts(content: Any) -> Any:
    """Return the content of a message as a text or, with images, as parts."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
