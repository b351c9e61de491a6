"""Markers of the served model's reasoning and tool calls, and whether its chat template knows tools."""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastinfer.errors import FastinferError
from fastinfer.server.parsing.spec import ParserSpec
from fastinfer.server.parsing.specs import AUTO, OFF, find_spec
from fastinfer.tokenizers.chat_template import render
from fastinfer.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("fastinfer.server")

# The format in which calls are asked for where the template knows no tools.
GENERIC = "hermes"


@dataclass(frozen=True)
class OutputFormat:
    """Division of the model's answers into parts.

    Attributes:
        spec: how the parts are marked; ``None`` if everything is text.
        has_tools: whether requests may have tools.
        is_generic: whether the template knows no tools, so that the server writes them into the conversation.
        special_tokens: ids of the model's control tokens by their spelling.
    """

    spec: ParserSpec | None = None
    has_tools: bool = True
    is_generic: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)


def find_format(tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> OutputFormat:
    """Return the format of a model: of its ``response_template``, or else as its chat template shows.

    Args:
        tokenizer: the model's tokenizer.
        tool_call_parser, reasoning_parser: what to use instead, see :func:`fastinfer.server.parsing.find_spec`.
    """
    template = tokenizer.chat_template or ""
    config = {"response_template": tokenizer.response_template}
    is_replaceable = tool_call_parser == GENERIC or (tool_call_parser == AUTO and tokenizer.response_template is None)
    is_generic = is_replaceable and not _renders_tools(template)
    parser = GENERIC if is_generic else tool_call_parser
    try:
        spec = find_spec(template, config, parser, reasoning_parser)
    except FastinferError as error:
        LOG.warning("%s; the chat template is used instead", error)
        spec = find_spec(template, {}, parser, reasoning_parser)
    return OutputFormat(spec, tool_call_parser != OFF, is_generic, tokenizer.control_tokens)


def _renders_tools(template: str) -> bool:
    """Return whether a tool appears in a rendered conversation. The word alone may be a part of a template's text."""
    if "tools" not in template:
        return False
    name = f"f{secrets.token_hex(8)}"
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    try:
        return name in render(template, [{"role": "user", "content": "Hello"}], tools=[tool])
    except FastinferError:  # it may want something else of a conversation
        return True
