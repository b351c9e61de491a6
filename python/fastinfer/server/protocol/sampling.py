"""Fields that chats and completions share: OpenAI's, and vLLM's under vLLM's names."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fastinfer.sampling_params import MAX_ALLOWED_TOKEN_IDS
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.many import Entries, Items
from fastinfer.server.protocol.one_of import OneOf

MAX_STOP_TOKENS = 1024
# Longest strings that are kept with a request or repeated in its answer.
MAX_ID_CHARS = 128
MAX_USER_CHARS = 512

ShortText = Annotated[str, Field(max_length=MAX_USER_CHARS)]


class StreamOptions(RequestModel):
    """Options of a stream.

    Attributes:
        include_usage: whether a last chunk without choices has the usage.
        continuous_usage_stats: whether every chunk has the usage so far.
        include_obfuscation: padding against an observer who sees the sizes of packets; only ``false`` is supported.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PlainFormat(RequestModel):
    """A text without a constraint, or any JSON object."""

    type: Literal["text", "json_object"]


class JSONSchema(RequestModel):
    """A JSON schema that the text obeys; it is enforced whether ``strict`` is set or not."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JSONSchemaFormat(RequestModel):
    """A constraint on the text by a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JSONSchema


ResponseFormat = Annotated[PlainFormat | JSONSchemaFormat, OneOf("type")]


class StructuredOutputs(RequestModel):
    """vLLM's constraint on the text: exactly one of the fields, see :class:`fastinfer.StructuredOutputsParams`."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: str | dict[str, Any] | None = None


class SamplingFields(RequestModel):
    """The fields; ``None`` stands for the default of the model, see :func:`fastinfer.server.params.sampling_params`."""

    renamed: ClassVar = {
        name: f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar", "structural_tag")
    }

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Entries[float] | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Names of the caller's user: kept nowhere, and without effect on the text.
    user: ShortText | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[Items[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[Items[str], Field(max_length=128)] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    request_id: Annotated[str, Field(max_length=MAX_ID_CHARS, pattern=r"^[!-~]+$")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Annotated[int, Field(ge=1, le=1024)] | None = None

    # Declared, so that they are refused by name and with a reason.
    use_beam_search: Literal[False] | None = None
    logprob_token_ids: None = Field(default=None, description="top_logprobs gives the most likely tokens")
    guided_json: None = Field(default=None, description="use structured_outputs.json")
    guided_regex: None = Field(default=None, description="use structured_outputs.regex")
    guided_choice: None = Field(default=None, description="use structured_outputs.choice")
    guided_grammar: None = Field(default=None, description="use structured_outputs.grammar")

    def field_names(self) -> dict[str, str]:
        """Return the request's names of fields by the names that errors have."""
        names = super().field_names()
        if self.structured_outputs is None:
            names |= {"structured_outputs": "response_format", "json": "response_format.json_schema.schema"}
        return names
