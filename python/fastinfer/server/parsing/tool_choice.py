"""Grammars of answers for structured output: forced tool calls, checked arguments, and texts behind reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.server.parsing.answer_grammar import AnswerGrammar
from fastinfer.server.parsing.spec import CallMarkup, CallObjects, ParserSpec, Region
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import show

# For models whose own format no grammar here describes: a list in JSON, which any model can write.
_LIST = CallMarkup('{"name": "%s", "arguments": ', "}", before="[", after="]", separator=", ")
_LIST_REGION = Region(r"^\s*(?P<body>\[)", None, CallObjects())

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerConstraint:
    """Constraint on an answer, and how to read it.

    Attributes:
        structured_outputs: the constraint for the engine.
        spec: how to read the output.
    """

    structured_outputs: StructuredOutputsParams
    spec: ParserSpec


def constrain_answer(
    spec: ParserSpec | None,
    tools: Tools,
    tool_choice: str | Mapping[str, Any],
    *,
    text: StructuredOutputsParams | None = None,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
    in_reasoning: bool = False,
    may_reason: bool = False,
) -> AnswerConstraint | None:
    """Return the constraint of an answer.

    Args:
        spec: how the model marks its output; ``None`` if that is not known.
        tools: the request's tools, as in OpenAI's API.
        tool_choice: "none", "auto", "required", or ``{"type": "function", "function": {"name": ...}}``.
        text: constraint on the text of an answer that calls no tools; ``None`` for none.
        parallel: whether there may be several calls; a named tool is called once.
        special_tokens: ids of the model's special tokens by their spelling; those that are no markers do not matter.
        in_reasoning: whether the prompt ends in open reasoning, which the model must close first.
        may_reason: whether the model may open its reasoning itself.

    Returns:
        The constraint; ``None`` if the answer is free, or constrained by nothing but ``text``. With "auto" calls are
        constrained if a function is strict, or if there may be one call only, and the model's format has a marker at
        which a call begins.

    Raises:
        RequestError: the choice is malformed or names no tool; the tools make the grammar too long; or ``text`` or the
            model's format cannot be a part of the grammar that is needed.
    """
    region = None if spec is None else spec.reasoning
    may_reason = may_reason and region is not None and bool(region.begin_text)
    markers = () if spec is None else spec.markers
    ids = special_tokens or {}
    grammar = AnswerGrammar({marker: ids[marker] for marker in markers if marker in ids})
    answer: str | None
    is_free = False  # outside calls
    if tool_choice not in ("none", "auto"):
        answer, spec = _forced(grammar, spec, _chosen(tools, tool_choice), parallel and tool_choice == "required")
    elif text is not None:
        may_reason = may_reason and text.field not in ("grammar", "structural_tag")
        if not (tools or in_reasoning or may_reason):
            return None
        answer = _text_or_calls(grammar, spec, text, tools, parallel)
    else:
        is_free = True
        answer = _strict_calls(grammar, spec, tools if tool_choice == "auto" else [], parallel)
    if answer is None:
        return None
    if region is not None and in_reasoning:
        answer = f"{grammar.reasoning(region)} {answer}"
    elif region is not None and may_reason and not is_free:
        answer = f"({grammar.text(region.begin_text)} {grammar.reasoning(region)})? {answer}"
    return AnswerConstraint(grammar.finish(answer), spec or ParserSpec(regions=(), start_anchors=()))


def _forced(grammar: AnswerGrammar, spec: ParserSpec | None, tools: Tools, several: bool) -> tuple[str, ParserSpec]:
    """Return terms that match calls, and how to read these."""
    markup, spec = _markup(spec)
    calls = _calls(grammar, markup, tools, several)
    return f"{grammar.text(markup.before)} {calls} {grammar.text(markup.after)}", replace(spec, only_calls=True)


def _text_or_calls(
    grammar: AnswerGrammar, spec: ParserSpec | None, text: StructuredOutputsParams, tools: Tools, parallel: bool
) -> str:
    """Return terms that match a constrained text, or calls if there are tools."""
    answer = grammar.constrained_text(text)
    if not tools:
        return answer
    if spec is None or spec.markup is None:
        raise RequestError("tools: expected no constraint on the text, as this model's calls would not fit into it")
    return f"({answer} | {_calls(grammar, spec.markup, tools, parallel)})"


def _strict_calls(grammar: AnswerGrammar, spec: ParserSpec | None, tools: Tools, parallel: bool) -> str | None:
    """Return terms that match a text in which calls are constrained; ``None`` if nothing asks for that."""
    markup = None if spec is None else spec.markup
    if spec is None or markup is None or not markup.trigger:
        return None
    if not tools or (parallel and not any(tool["function"].get("strict") is True for tool in tools)):
        return None
    others = [marker for marker in spec.markers if marker != markup.trigger]
    calls = grammar.calls(tools, replace(markup, begin=markup.begin.removeprefix(markup.trigger)))
    return grammar.text_with_calls(calls, others, markup.trigger, parallel)


def _calls(grammar: AnswerGrammar, markup: CallMarkup, tools: Tools, several: bool) -> str:
    """Return terms that match one call, or several."""
    calls = grammar.calls(tools, markup)
    if several and markup.separator is not None:
        return f"{calls} ({grammar.text(markup.separator)} {calls})*"
    return calls


def _chosen(tools: Tools, choice: str | Mapping[str, Any]) -> Tools:
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
