"""A grammar of a model's answer, part by part, in Lark's dialect as llguidance reads it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.server.parsing.spec import CallMarkup, Region
from fastinfer.server.parsing.value_reader import escape
from fastinfer.structured_output import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from fastinfer.utils.checks import show

_BLANK_LINES = r"/\n{0,2}/"
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Without these a model may write blanks between values until it reaches its limit.
_JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# Keywords by which a schema says more about its properties.
_OPEN = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
# Keywords with schemas by names, with values, and for readers.
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentSchemas", "dependentRequired"}
)
_VALUES = frozenset({"const", "enum"})
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment"})
# Keywords that cannot be enforced are dropped from the schemas of functions that are not strict.
_LENIENT = {"lenient": True, "coerce_one_of": True}


class AnswerGrammar:
    """Collects the rules of a grammar. Its methods return the terms that match a part of the answer.

    Args:
        special_tokens: ids by spelling. The text of a special token is generated as this token.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._rules: list[str] = []
        self._special_tokens = special_tokens
        self._num_calls = 0

    def finish(self, start: str) -> StructuredOutputsParams:
        """Return the grammar of an answer that matches ``start``.

        Raises:
            RequestError: it is too long.
        """
        grammar = "\n".join([f"start: {start}", *self._rules])
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"tools or the format of the text: expected at most {MAX_GRAMMAR_CHARS} characters in all schemas that "
                f"are enforced, without descriptions, got {len(grammar)}"
            )
        return StructuredOutputsParams(grammar=grammar)

    def text(self, text: str | None) -> str:
        """Match a text."""
        terms = []
        while text:
            found = [(text.find(token), -len(token), token) for token in self._special_tokens if token in text]
            place, _, token = min(found, default=(len(text), 0, ""))
            if place:
                terms.append(json.dumps(text[:place], ensure_ascii=False))
            if token:
                terms.append(f"<[{self._special_tokens[token]}]>")
            text = text[place + len(token) :]
        return " ".join(terms)

    def calls(self, tools: Sequence[Mapping[str, Any]], markup: CallMarkup) -> str:
        """Match a call of one of the tools.

        Raises:
            RequestError: a tool's parameters are no JSON schema.
        """
        calls = [self._call(tool["function"], markup) for tool in tools]
        self._rules.append(f"calls_{self._num_calls}: {' | '.join(calls)}")
        return f"calls_{self._num_calls}"

    def _call(self, function: Mapping[str, Any], markup: CallMarkup) -> str:
        schema = _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"]
        if not isinstance(schema, Mapping):
            raise RequestError(f"tools: expected parameters as a JSON schema, got {show(schema)}")
        options = _JSON_OPTIONS if function.get("strict") is True else _JSON_OPTIONS | _LENIENT
        # Without its type a schema would allow other values, which are no arguments: what is written would be no call.
        text = json.dumps({**_closed(_bare(schema)), "type": "object", "x-guidance": options}, ensure_ascii=False)
        self._num_calls += 1
        self._rules.append(f"arguments_{self._num_calls}: %json {text}")
        begin = markup.begin % escape(function["name"])
        return f"{self.text(begin)} arguments_{self._num_calls} {self.text(markup.end)}"

    def reasoning(self, region: Region) -> str:
        """Match reasoning that has begun, with its end.

        Raises:
            RequestError: it is not known how the model ends its reasoning.
        """
        end = region.end_text
        if not end:
            raise RequestError("the answer cannot be constrained behind this model's reasoning")
        if end in self._special_tokens:
            self._rules.append("reasoning: /(?s:.*)/")
            return f"reasoning {self.text(end)} {_BLANK_LINES}"
        self._rules.append(f"reasoning[suffix={json.dumps(end)}]: /(?s:.*)/")
        return f"reasoning {_BLANK_LINES}"

    def _pieces(self, markers: Sequence[str]) -> str:
        """Match texts each of which ends with a marker that is a special token."""
        ids = [f"<[{self._special_tokens[marker]}]>" for marker in markers if marker in self._special_tokens]
        if not ids:
            return ""
        self._rules.append(f"piece: TEXT ({' | '.join(ids)})")
        return "piece* "

    def text_with_calls(self, calls: str, markers: Sequence[str], trigger: str, parallel: bool) -> str:
        """Match any text in which each trigger is followed by calls.

        Args:
            calls: terms that match what follows the trigger.
            markers: texts of which those that are special tokens may be in the text.
            trigger: marker that the free text does not contain.
            parallel: whether there may be several calls; otherwise the answer ends with the first one.
        """
        self._rules.append("TEXT: /(?s:.*)/")
        pieces = self._pieces(markers)
        if trigger in self._special_tokens:
            self._rules.append(f"before: {pieces}TEXT {self.text(trigger)}")
        else:
            self._rules.append(f"head[lazy]: TEXT {json.dumps(trigger)}")
            self._rules.append(f"before: {pieces}head")
        return f"(before {calls})* {pieces}TEXT" if parallel else f"(before {calls} | {pieces}TEXT)"

    def constrained_text(self, params: StructuredOutputsParams) -> str:
        """Match a text that obeys a constraint.

        Raises:
            RequestError: the constraint is a grammar or structural tags.
        """
        if params.json is not None or params.json_object:
            schema = _ANY_OBJECT if params.json is None else json.loads(str(params.json))
            text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
            self._rules.append(f"text: %json {text}")
        elif params.regex is not None:
            self._rules.append(f"text: /{_slashes(params.regex)}/")
        elif params.choice is not None:
            self._rules.append(f"text: {' | '.join(json.dumps(text, ensure_ascii=False) for text in params.choice)}")
        else:
            raise RequestError(
                f"structured_outputs: {params.field} cannot be combined with tools or with open reasoning; "
                "tool_choice none and reasoning_effort none turn these off"
            )
        return "text"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments without further properties, which small models invent."""
    properties = schema.get("properties")
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or schema.keys() & _OPEN:
        return schema
    is_closed = all(isinstance(name, str) and name in properties for name in required)
    return {**schema, "additionalProperties": False} if is_closed else schema


def _bare(schema: Any) -> Any:
    """Return a schema without its descriptions, which can be most of it and say nothing to a grammar."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            bare[key] = {name: _bare(item) for name, item in value.items()}
        elif key in _VALUES:
            bare[key] = value
        elif key not in _ANNOTATIONS:
            bare[key] = _bare(value)
    return bare


def _slashes(regex: str) -> str:
    """Return a regular expression as it is written between slashes on one line."""
    escaped, is_escape = [], False
    for character in regex:
        letter = "n" if character == "\n" else character
        escaped.append(f"\\{letter}" if character in "/\n" and not is_escape else letter)
        is_escape = character == "\\" and not is_escape
    return "".join(escaped)
