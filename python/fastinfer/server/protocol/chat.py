"""Requests of ``/v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.sampling import SamplingFields, ShortText

MAX_TOOLS = 128
# Arguments of the renderer itself, which a request must not replace (CVE-2025-62426).
RENDERER_NAMES = frozenset(
    {
        *("template", "chat_template", "messages", "tools", "documents", "bos_token", "eos_token"),
        *("add_generation_prompt", "continue_final_message", "engine", "cache_salt"),
    }
)


class FunctionCall(RequestModel):
    """The function that a tool call names; the arguments are JSON text, or what it means."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(RequestModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(RequestModel):
    """A message. Clients send earlier answers back as they came, so fields that only answers have may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = Field(default=None, description="use tool_calls")

    def for_template(self) -> dict[str, Any]:
        """Return the message with the fields that chat templates know, as far as they are given."""
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        fields: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        if self.tool_calls:
            fields["tool_calls"] = [call.model_dump(exclude={"index"}, exclude_none=True) for call in self.tool_calls]
        return {name: value for name, value in fields.items() if value is not None or name == "content"}


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[\w.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """The name of a function."""

    name: str


class NamedToolChoice(RequestModel):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """A request to answer a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None

    echo: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Names of the caller's user and request, and hints for caches: without effect on the text.
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    metadata: dict[str, str] | None = None
    # Accepted where they ask for what the server does anyway.
    modalities: list[Literal["text"]] | None = None
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
    thinking_token_budget: None = Field(default=None, description="use max_completion_tokens")
    web_search_options: None = None
