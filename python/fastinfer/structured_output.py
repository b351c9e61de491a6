"""Constraints on a generated text: a JSON schema, a regular expression, or a list of choices."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.utils.checks import show

# Limits far beyond common use, which still compile in about a second.
MAX_SCHEMA_CHARS = 2**18
MAX_SCHEMA_DEPTH = 100  # the compiler's own JSON reader stops at 128
MAX_REGEX_CHARS = 2**14
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 2**18  # total of all choices

_QUOTE_OR_BRACKET = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on a generated text: exactly one of ``json``, ``regex`` and ``choice``. Names follow vLLM.

    Values are normalised, ``json`` to compact text and ``choice`` to a tuple, so that equal constraints compare and
    hash equal however they were given.

    Attributes:
        json: a JSON schema (draft 2020-12) as a dict or as text; ``{"type": "object"}`` allows any object. Properties
            are generated in the schema's order, with one space after each ``,`` and ``:`` and no other white space, as
            ``json.dumps`` writes them; with free white space a small model may write blanks until ``max_tokens``.
            Unbounded strings and arrays carry the same risk: give them ``maxLength`` and ``maxItems``. Keywords that
            cannot be enforced (``not``, ``if``, ``uniqueItems``, a ``oneOf`` whose cases may overlap) and unknown
            formats are refused when the schema is compiled.
        regex: a regular expression that the whole text matches, without look-around and back-references.
        choice: the texts to choose from.

    Raises:
        RequestError: none or several of the three are given; a value has a wrong type, is too long, too deeply nested
            or too numerous; the schema is not a JSON object; or a string contains a lone surrogate.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise RequestError(f"structured outputs must have exactly one of json, regex and choice, got {got}")
        if self.json is not None:
            object.__setattr__(self, "json", _canonical_schema(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))


def _canonical_schema(schema: object) -> str:
    """Return the schema as compact JSON. The order of properties is meaningful and stays."""
    if not isinstance(schema, str | dict):
        raise RequestError(f"json must be a JSON schema as a dict or a str, got {show(schema)}")
    text = schema if isinstance(schema, str) else _dumps(schema)
    _check_text("json", text, MAX_SCHEMA_CHARS)
    if (depth := _depth(text)) > MAX_SCHEMA_DEPTH:
        raise RequestError(f"json must be nested at most {MAX_SCHEMA_DEPTH} deep, got {depth}")
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RequestError(f"json must be a JSON schema, got {show(text)}: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"json must be a JSON schema that is an object, got {show(text)}")
    canonical = _dumps(parsed)
    _check_text("json", canonical, MAX_SCHEMA_CHARS)  # escape sequences may have hidden lone surrogates
    return canonical


def _dumps(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError(f"json must be nested at most {MAX_SCHEMA_DEPTH} deep, got many more") from None
    except (TypeError, ValueError) as error:  # not a JSON type, a cycle, or NaN
        raise RequestError(f"json must be a dict of JSON values, got one where {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _depth(text: str) -> int:
    """Return how deep brackets nest. This is checked before parsing, because the parser recurses."""
    depth = deepest = 0
    in_string = False
    for match in _QUOTE_OR_BRACKET.finditer(text):
        mark = match[0]
        if mark == '"':
            in_string = not in_string
        elif not in_string and mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif not in_string and mark in "]}":
            depth -= 1
    return deepest


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= MAX_CHOICES:
        got = f"{len(choices)} of them" if isinstance(choices, list | tuple) else show(choices)
        raise RequestError(f"choice must be a list of 1..{MAX_CHOICES} strings, got {got}")
    for choice in choices:
        _check_text("choice", choice, MAX_CHOICE_CHARS)
    if (total := sum(map(len, choices))) > MAX_CHOICE_CHARS:
        raise RequestError(f"choice must have at most {MAX_CHOICE_CHARS} characters in all, got {total}")
    return tuple(choices)


def _check_text(name: str, text: object, limit: int) -> None:
    """Raise RequestError unless ``text`` is a non-empty string without lone surrogates, of at most ``limit`` chars."""
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} must be a non-empty string, got {show(text)}")
    if len(text) > limit:
        raise RequestError(f"{name} must have at most {limit} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} must be text, got a lone surrogate at position {error.start}") from None
