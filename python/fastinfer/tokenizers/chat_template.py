"""Chat messages to one prompt, by the Jinja template that a model's file carries.

A template is code from a stranger's file: it runs in jinja2's sandbox, without access to Python's internals. The
conventions (whitespace, filters, names) are those of https://huggingface.co/docs/transformers/chat_templating.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from fastinfer.errors import RequestError, UnsupportedModelError


def render(
    template: str | None,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """Write a conversation as the prompt that the model was trained on.

    The template itself writes special tokens, the beginning-of-text token included: encode the result with
    ``add_special_tokens=False``.

    Args:
        template: the Jinja source, :attr:`fastinfer.tokenizers.tokenizer.Tokenizer.chat_template`.
        messages: each with a "role" and a "content"; all values are strings.
        add_generation_prompt: end with the words that begin the assistant's answer.
        bos_token, eos_token: spellings of the model's special tokens.
        variables: further names that the template knows, such as ``enable_thinking``.

    Raises:
        UnsupportedModelError: there is no template, it is no valid Jinja, or it reaches for what the sandbox forbids.
        RequestError: the messages are malformed, or the template refuses them.
    """
    if template is None:
        raise UnsupportedModelError("the model's file has no chat template; use generate with a plain prompt")
    _check(messages)
    names = {"tools": None, "documents": None, "bos_token": bos_token, "eos_token": eos_token, **variables}
    compiled = _compile(template)
    try:
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
    except SecurityError as error:
        raise UnsupportedModelError(f"the model's chat template is not safe to run: {_one_line(error)}") from None
    except Exception as error:  # a template can fail in any way that Python can
        raise RequestError(f"the model's chat template failed on these messages: {_one_line(error)}") from None


def _check(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages: expected a list of at least one message, got {_one_line(repr(messages))}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: expected a dict, got {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"messages[{index}]: {key!r} is missing")
        for key, value in message.items():
            if not isinstance(value, str):
                raise RequestError(f"messages[{index}][{key!r}]: expected a str, got {type(value).__name__}")


# Compiling takes longer than rendering, and a program has one or two templates.
@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except Exception as error:  # jinja2's own errors, and Python's for code that is nested too deep
        raise UnsupportedModelError(f"the model's chat template is not valid: {_one_line(error)}") from None


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox (which also limits ``range`` to 100,000), made to fail at the first forbidden attribute."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
