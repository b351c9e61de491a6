"""Constraints on a generated text: a JSON schema, a regular expression, choices, a grammar, or structural tags."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from fastinfer.errors import RequestError
from fastinfer.utils.checks import show

# Limits far beyond common use, which still compile in about a second.
MAX_SCHEMA_CHARS = 2**18
MAX_SCHEMA_DEPTH = 100  # the compiler's own JSON reader stops at 128
MAX_REGEX_CHARS = 2**14
MAX_GRAMMAR_CHARS = 2**16
MAX_TAGS = 128
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 2**18  # total of all choices

Item = TypeVar("Item")

_QUOTE_OR_BRACKET = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on a generated text: exactly one of the fields below. Names follow vLLM.

    Values are normalised, ``json`` and ``structural_tag`` to compact text and ``choice`` to a tuple, so that equal
    constraints compare and hash equal however they were given.

    Attributes:
        json: a JSON schema (draft 2020-12) as a dict or as text; ``{"type": "object"}`` allows any object. Properties
            are generated in the schema's order, with one space after each ``,`` and ``:`` and no other white space, as
            ``json.dumps`` writes them; with free white space a small model may write blanks until ``max_tokens``.
            Unbounded strings and arrays carry the same risk: give them ``maxLength`` and ``maxItems``. Keywords that
            cannot be enforced (``not``, ``if``, ``uniqueItems``, a ``oneOf`` whose cases may overlap) and unknown
            formats are refused when the schema is compiled. Where other properties are allowed, one of them may spell a
            property's name with escape sequences; ``"additionalProperties": false`` rules that out.
        regex: a regular expression that the whole text matches, without look-around and back-references.
        choice: the texts to choose from.
        grammar: a context-free grammar whose start rule the whole text matches: EBNF as llama.cpp writes it (GBNF, with
            the rule ``root``) or Lark's dialect as llguidance reads it (with the rule ``start``).
        json_object: ``True`` for any JSON object.
        structural_tag: free text in which some parts are constrained, such as the arguments of tool calls, as a dict or
            as JSON text: ``{"structures": [{"begin": text, "schema": JSON schema, "end": text}, ...], "triggers":
            [text, ...]}``. Once the text contains a trigger, it goes on with a ``begin`` that starts with this trigger,
            a JSON value that obeys the schema, and ``end``; then it is free again.

    Raises:
        RequestError: none or several of the fields are given; a value has a wrong type, is too long, too deeply nested
            or too numerous; the schema is not a JSON object; or a string contains a lone surrogate.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            every = ", ".join(field.name for field in fields(self))
            raise RequestError(
                f"structured_outputs must have exactly one of {every}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _canonical_schema(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARS)
        if self.json_object not in (None, True):
            raise RequestError(f"json_object must be True or None, got {show(self.json_object)}")
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _canonical_tags(self.structural_tag))

    @property
    def field(self) -> str:
        """Name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def num_chars(self) -> int:
        """Length of the constraint in characters; 0 for ``json_object``."""
        value = getattr(self, self.field)
        return sum(map(len, value)) if isinstance(value, tuple) else len(value) if isinstance(value, str) else 0


def _canonical_schema(schema: object) -> str:
    """Return the schema as compact JSON. The order of properties is meaningful and stays."""
    return _dumps("json", _json_object("json", schema, "a JSON schema"))


def _canonical_tags(value: object) -> str:
    """Return structural tags as compact JSON."""
    name = "structural_tag"
    tags = _json_object(name, value, "structural tags")
    structures = _list_of(dict, "structures", tags)
    triggers = _list_of(str, "triggers", tags)
    for trigger in triggers:
        _check_text(f"{name}.triggers", trigger, MAX_CHOICE_CHARS)
    for index, structure in enumerate(structures):
        place = f"{name}.structures[{index}]"
        begin, end = structure.get("begin"), structure.get("end")
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(structure.get("schema"), dict):
            raise RequestError(
                f"{place} must have the strings begin and end and the object schema, got {show(structure)}"
            )
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise RequestError(f"{place}.begin must start with one of the triggers, got {show(begin)}")
    return _dumps(name, tags)


def _list_of(kind: type[Item], name: str, tags: dict[str, Any]) -> list[Item]:
    """Return a list of structural tags' parts."""
    value = tags.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS or not all(isinstance(v, kind) for v in value):
        kinds = "objects" if kind is dict else "strings"
        raise RequestError(f"structural_tag.{name} must be a list of 1..{MAX_TAGS} {kinds}, got {show(value)}")
    return value


def _json_object(name: str, value: object, kind: str) -> dict[str, Any]:
    """Return the object that a dict or a JSON text stands for, as JSON would read it back."""
    if not isinstance(value, str | dict):
        raise RequestError(f"{name} must be {kind} as a dict or a str, got {show(value)}")
    text = value if isinstance(value, str) else _dumps(name, value)
    _check_text(name, text, MAX_SCHEMA_CHARS)
    if (depth := _depth(text)) > MAX_SCHEMA_DEPTH:
        raise RequestError(f"{name} must be nested at most {MAX_SCHEMA_DEPTH} deep, got {depth}")
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RequestError(f"{name} must be {kind}, got {show(text)}: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{name} must be {kind} as an object, got {show(text)}")
    _check_text(name, _dumps(name, parsed), MAX_SCHEMA_CHARS)  # escape sequences may have hidden lone surrogates
    return parsed


def _dumps(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError(f"{name} must be nested at most {MAX_SCHEMA_DEPTH} deep, got many more") from None
    except (TypeError, ValueError) as error:  # not a JSON type, a cycle, or NaN
        raise RequestError(f"{name} must be a dict of JSON values, got one where {error}") from None


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
