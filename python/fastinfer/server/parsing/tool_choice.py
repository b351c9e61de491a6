"""Makes a model call tools: ``tool_choice`` as a grammar for structured output, and how to read what it generates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.server.parsing.spec import CallMarkup, CallObjects, ParserSpec, Region
from fastinfer.server.parsing.value_reader import escape
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import show

# For models whose own format no grammar here describes: a list in JSON, which any model can write.
_LIST = CallMarkup('{"name": "%s", "arguments": ', "}", before="[", after="]", separator=", ")
_LIST_REGION = Region(r"^\s*(?P<body>\[)", None, CallObjects())

_BLANK_LINES = r"/\n{0,2}/"
_ANY_OBJECT = {"type": "object"}
# Without these a model may write blanks between values until it reaches its limit.
_JSON_OPTIONS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True)
class ToolConstraint:
    """What forces tool calls.

    Attributes:
        structured_outputs: the constraint for the engine.
        spec: how to read the output.
    """

    structured_outputs: StructuredOutputsParams
    spec: ParserSpec


def constrain_tool_choice(
    spec: ParserSpec | None,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    *,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
    in_reasoning: bool = False,
) -> ToolConstraint | None:
    """Return the constraint of a request's ``tool_choice``.

    Args:
        spec: how the model marks its output; ``None`` if that is not known.
        tools: the request's tools, as in OpenAI's API.
        tool_choice: "none", "auto", "required", or ``{"type": "function", "function": {"name": ...}}``.
        parallel: whether there may be several calls; a named tool is called once.
        special_tokens: ids of the model's special tokens by their spelling.
        in_reasoning: whether the prompt ends in open reasoning, which the model must close first.

    Returns:
        The constraint, or ``None`` for "none" and "auto", which constrain nothing.

    Raises:
        RequestError: the choice is malformed or names no tool, or the tools make the grammar too long.
    """
    if tool_choice in ("none", "auto"):
        return None
    chosen = _chosen(tools, tool_choice)
    several = parallel and tool_choice == "required"
    markup, spec = _markup(spec)
    grammar = _Grammar(special_tokens or {})
    call = [grammar.call(tool["function"], markup, number) for number, tool in enumerate(chosen)]
    calls = f"call ({grammar.text(markup.separator)} call)*" if several and markup.separator is not None else "call"
    start = [grammar.text(markup.before), calls, grammar.text(markup.after)]
    if in_reasoning and spec.reasoning is not None:
        start.insert(0, grammar.reasoning(spec.reasoning))
    rules = [f"start: {' '.join(filter(None, start))}", f"call: {' | '.join(call)}", *grammar.rules]
    return ToolConstraint(StructuredOutputsParams(grammar="\n".join(rules)), spec)


def _chosen(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools that may be called."""
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and tools:
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise RequestError(f"tool_choice: expected auto, none, required or one of {show(names)}, got {show(choice)}")
    return [tools[names.index(name)]]


def _markup(spec: ParserSpec | None) -> tuple[CallMarkup, ParserSpec]:
    """Return how the calls are written, and how they are read."""
    if spec is not None and spec.markup is not None:
        return spec.markup, spec
    spec = spec or ParserSpec(regions=(), start_anchors=())
    passages = tuple(region for region in spec.regions if not region.has_calls)
    return _LIST, replace(spec, regions=(*passages, _LIST_REGION), markup=None)


class _Grammar:
    """Collects the rules of a grammar in Lark's dialect, as llguidance reads it.

    Args:
        special_tokens: ids by spelling. The text of a special token is generated as this token.

    Attributes:
        rules: the rules so far.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_tokens = special_tokens

    def text(self, text: str | None) -> str:
        """Return the terms that match a text."""
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

    def call(self, function: Mapping[str, Any], markup: CallMarkup, number: int) -> str:
        """Return the terms that match a call of a tool."""
        schema = function.get("parameters") or _ANY_OBJECT
        if not isinstance(schema, Mapping):
            raise RequestError(f"tools: expected parameters as a JSON schema, got {show(schema)}")
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
        self.rules.append(f"arguments_{number}: %json {text}")
        begin = markup.begin % escape(function["name"])
        return f"{self.text(begin)} arguments_{number} {self.text(markup.end)}"

    def reasoning(self, region: Region) -> str:
        """Return the terms that match open reasoning with its end."""
        end = region.end_text
        if end in self._special_tokens:
            self.rules.append("reasoning: /(?s:.*)/")
            return f"reasoning {self.text(end)} {_BLANK_LINES}"
        self.rules.append(f"reasoning[suffix={json.dumps(end)}]: /(?s:.*)/")
        return f"reasoning {_BLANK_LINES}"
