"""Rendering of chat messages as a prompt, with the Jinja template of the model's file.

A template is untrusted code: it runs in jinja2's sandbox, without access to Python's internals. The conventions
(whitespace, filters, names) are those of https://huggingface.co/docs/transformers/chat_templating.
"""

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.tokenizers.chat_messages import Message, check_tools, normalize
from fastinfer.utils.text import one_line


def render(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """Render a conversation in the prompt format that the model was trained on.

    The template writes all special tokens, including the beginning-of-text token, so encode the result with
    ``add_special_tokens=False``.

    Args:
        template: Jinja source, :attr:`fastinfer.tokenizers.tokenizer.Tokenizer.chat_template`.
        messages: messages with a "role" and a "content", a text or a list of parts of the type "text". The content of
            one with "tool_calls" may be ``None``; other fields are passed on to the template.
        add_generation_prompt: whether to end with the text that starts the assistant's answer.
        bos_token, eos_token: spellings of the model's special tokens.
        variables: more variables of the template, such as ``tools`` and ``enable_thinking``.

    Returns:
        The prompt.

    Raises:
        UnsupportedModelError: there is no template, it is not valid Jinja, or the sandbox forbids what it does.
        RequestError: the messages are malformed, or the template refuses them.
    """
    if template is None:
        raise UnsupportedModelError("the model's file has no chat template; use generate with a plain prompt")
    normalized = normalize(messages)
    check_tools(variables.get("tools"))
    names = {"tools": None, "documents": None, "bos_token": bos_token, "eos_token": eos_token, **variables}
    compiled = _compile(template)
    try:
        return compiled.render(messages=normalized, add_generation_prompt=add_generation_prompt, **names)
    except SecurityError as error:
        raise UnsupportedModelError(f"the model's chat template is not safe to run: {one_line(error)}") from None
    except Exception as error:  # a template can raise any Python error
        raise RequestError(f"the model's chat template failed on these messages: {one_line(error)}") from None


# Compiling takes longer than rendering, and a program has one or two templates.
@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except Exception as error:  # jinja2's errors, and Python's own for code that is nested too deeply
        raise UnsupportedModelError(f"the model's chat template is not valid: {one_line(error)}") from None


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that raises an error at the first forbidden attribute; it also limits ``range`` to 100,000."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")


class _Generation(Extension):
    """Support of ``{% generation %}``, which marks the assistant's words for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Print plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
