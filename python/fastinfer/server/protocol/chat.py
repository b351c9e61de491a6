"""Requests of ``/v1/chat/completions``."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.many import Entries, Items
from fastinfer.server.protocol.one_of import OneOf
from fastinfer.server.protocol.sampling import SamplingFields, ShortText
from fastinfer.serving.prompt import RENDERER_NAMES
from fastinfer.utils.checks import show
from fastinfer.utils.text import one_line

MAX_TOOLS = 128
MAX_BUDGET = 2**31 - 1
# What chat_template_kwargs must not replace (CVE-2025-62426): the renderer's own names, and those that have a field.
RESERVED_NAMES = RENDERER_NAMES | {"tools", "documents", "add_generation_prompt"}


class TextPart(RequestModel):
    """A part of a content. Prefixes are always cached, so ``cache_control`` asks for what the server does anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class ImageURL(RequestModel):
    """The address of an image, which must be a data: URI. The model's own processor decides on the detail."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(RequestModel):
    """An image in a content."""

    type: Literal["image_url"]
    image_url: ImageURL
    cache_control: dict[str, Any] | None = None


Content = Annotated[str | Items[Annotated[TextPart, OneOf("type")]], OneOf("type")]
InputContent = Annotated[str | Items[Annotated[TextPart | ImagePart, OneOf("type")]], OneOf("type")]


def _read_arguments(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, which may be JSON text; none are an empty text."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            reason = {"reason": one_line(error)}
            raise PydanticCustomError("arguments", "expected JSON, got text that is none: {reason}", reason) from None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "expected a JSON object, got {got}", {"got": show(value)})
    return value


Arguments = Annotated[str | dict[str, Any], AfterValidator(_read_arguments)]


class Caller(RequestModel):
    """Caller of a tool: the model itself, not a program of the server."""

    type: Literal["direct"]


class FunctionCall(RequestModel):
    """The function that a tool call names; the arguments are JSON text, or what it means."""

    name: str
    arguments: Arguments = ""
    parsed_arguments: Any = None  # the openai package's own reading of the arguments, which it sends back


class ToolCall(RequestModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call with the fields that chat templates know."""
        fields: dict[str, Any] = self.model_dump(
            exclude={"index": True, "function": {"parsed_arguments"}}, exclude_none=True
        )
        return fields


class Message(RequestModel):
    """Base of the messages."""

    role: str
    content: InputContent | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, without images."""
        content = self.content or ""
        if isinstance(content, str):
            return content
        return "\n".join(part.text for part in content if isinstance(part, TextPart))

    @property
    def has_images(self) -> bool:
        """Whether there are images in the content."""
        return isinstance(self.content, list) and any(isinstance(part, ImagePart) for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message with the fields that chat templates know, as far as given; images are still to be read."""
        content: Any = self.text
        if self.has_images and isinstance(self.content, list):
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image", "image": part.image_url.url}
                for part in self.content
            ]
        fields = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return fields if self.name is None else {**fields, "name": self.name}


class InputMessage(Message):
    """A message of the user or of the program."""

    role: Literal["system", "developer", "user"]
    content: InputContent


class AssistantMessage(Message):
    """An earlier answer. Clients send it back as it came, so fields that only answers have may be null."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None  # the openai package's own reading of the content, which it sends back
    refusal: None = None
    audio: None = None
    function_call: None = None

    def model_post_init(self, _: Any) -> None:
        """Check that there is something in the message."""
        if self.content is None and not self.tool_calls and self.reasoning_content is None and self.reasoning is None:
            raise PydanticCustomError("empty", "expected content, tool_calls or reasoning_content")

    def for_template(self) -> dict[str, Any]:
        """Return the message with the fields that chat templates know, as far as they are given."""
        fields = super().for_template()
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if self.tool_calls:
            fields["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return fields


class ToolMessage(Message):
    """The result of a tool call."""

    role: Literal["tool"]
    content: InputContent
    tool_call_id: str

    def for_template(self) -> dict[str, Any]:
        """Return the message with the fields that chat templates know, as far as they are given."""
        return {**super().for_template(), "tool_call_id": self.tool_call_id}


class FunctionMessage(Message):
    """The result of a call as the interface had it before there were tools."""

    role: Literal["function"]
    content: Content | None = None
    name: str


ChatMessage = Annotated[InputMessage | AssistantMessage | ToolMessage | FunctionMessage, OneOf("role")]
_CONVERSATION: TypeAdapter[list[Any]] = TypeAdapter(Items[ChatMessage])


def conversation(messages: list[dict[str, Any]]) -> list[Any]:
    """Return messages, which other interfaces have under other names, as those of a chat."""
    checked: list[Any] = _CONVERSATION.validate_python(messages)
    return checked


ToolName = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]  # as long as Anthropic's; OpenAI has 64


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_model(self, *, with_strict: bool = False) -> dict[str, Any]:
        """Return the tool as chat templates and parsers know it; ``strict`` is about the output alone."""
        function = self.function.model_dump(exclude_none=True, exclude=None if with_strict else {"strict"})
        if not with_strict:  # some templates list the properties
            function.setdefault("parameters", {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


class NamedFunction(RequestModel):
    """The name of a function."""

    name: str


class NamedToolChoice(RequestModel):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    """The tools of which the model may call some, or must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(RequestModel):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, OneOf("type")]


class ChatRequest(SamplingFields):
    """A request to answer a conversation."""

    renamed: ClassVar = {
        **SamplingFields.renamed,
        "prompt": "messages",
        "prompt_token_ids": "messages",
        "template_variables": "chat_template_kwargs",
    }

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[Items[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=1, le=MAX_BUDGET)] | None = None

    echo: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Items[Entries[str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Names of the caller's user and request, and hints for caches: without effect on the text.
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    metadata: Entries[str] | None = None
    # Accepted where they ask for what the server does anyway.
    modalities: Items[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None

    audio: None = Field(default=None, description="the model has text alone")
    chat_template: None = Field(default=None, description="a template is a program; the model's own is used")
    function_call: None = Field(default=None, description="use tool_choice")
    functions: None = Field(default=None, description="use tools")
    moderation: None = None
    prediction: None = Field(default=None, description="the server predicts by itself with --speculate")
    prompt_cache_options: None = Field(default=None, description="prefixes are always cached; cache_salt parts them")
    web_search_options: None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model knows."""
        if self.tool_choice == "none":
            return []
        if not isinstance(self.tool_choice, AllowedToolChoice):
            return self.tools or []
        names = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return [tool for tool in self.tools or [] if tool.function.name in names]

    def field_names(self) -> dict[str, str]:
        """Return the request's names of fields by the names that errors have."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super().field_names(), "max_tokens": limit}
