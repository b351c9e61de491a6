"""Plan of a chat's output: what constrains it, and how it is read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastinfer.sampling_params import SamplingParams
from fastinfer.server.errors import APIError
from fastinfer.server.output_format import OutputFormat
from fastinfer.server.parsing import OutputParser, ParserSpec, begun_answer
from fastinfer.server.parsing.tool_choice import constrain_answer
from fastinfer.server.protocol.chat import AllowedToolChoice, ChatRequest
from fastinfer.server.reasoning_budget import ReasoningBudget
from fastinfer.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class OutputPlan:
    """Plan for a chat's output: its constraint and its parser.

    Attributes:
        params: the sampling parameters, with the constraint.
        make_parser: makes the parser of one choice; ``None`` if everything is text.
        constrains_calls: whether the constraint contains schemas of tools.
    """

    params: SamplingParams
    make_parser: Callable[[], OutputParser] | None = None
    constrains_calls: bool = False


def plan_output(
    body: ChatRequest, params: SamplingParams, form: OutputFormat, prompt: str, tokenizer: Tokenizer
) -> OutputPlan:
    """Return the plan of a request.

    Args:
        body: the request.
        params: its sampling parameters.
        form: how the model divides its answers.
        prompt: the rendered prompt, which may end in open reasoning.
        tokenizer: the model's tokenizer.

    Raises:
        APIError: the model's calls cannot be read, or two fields contradict each other.
        RequestError: the constraint is too long.
    """
    choice = _tool_choice(body)
    tools = [tool.for_model(with_strict=True) for tool in body.offered_tools]
    spec = form.spec
    if tools and not form.has_tools:
        raise APIError(400, "tools are switched off on this server (--tool-call-parser none)", param="tools")
    if choice == "auto" and (spec is None or not spec.has_calls):
        raise APIError(
            400,
            "tools: the format in which this model calls tools is not known; tool_choice required works, and the "
            "server's option --tool-call-parser names a format",
            param="tools",
        )
    if spec is not None and not tools:
        spec = spec.without_calls()
        spec = spec if spec.regions or spec.dropped else None
    begun = "" if spec is None else begun_answer(spec, prompt)
    text = params.structured_outputs
    if text is not None and choice not in ("auto", "none"):
        raise APIError(400, "tool_choice and a format of the text exclude each other", param="tool_choice")
    if text is not None and spec is not None:
        spec = replace(spec, drops_text=False)  # it is written without markers
    constraint = constrain_answer(
        spec,
        tools,
        choice,
        text=text,
        parallel=body.parallel_tool_calls is not False,
        special_tokens=form.special_tokens,
        in_reasoning=spec is not None and OutputParser(spec, begun, tools).is_reasoning,
        may_reason=body.reasoning_effort != "none" and not begun.strip(),
    )
    if constraint is not None:
        spec = constraint.spec
        params = replace(params, structured_outputs=constraint.structured_outputs)
    if spec is None:
        return OutputPlan(params)
    make_parser = _maker(spec, begun, tools)
    if params.skip_special_tokens:
        params = replace(params, kept_special_tokens=spec.special_markers(form.special_tokens))
    if body.thinking_token_budget is not None and spec.reasoning is not None:
        end_text, place = spec.reasoning.end_text, "thinking_token_budget"
        if not end_text:
            raise APIError(400, f"{place}: the length of this model's reasoning cannot be limited", param=place)
        end = tuple(tokenizer.encode(end_text, add_special_tokens=False, continues=True))
        budget = ReasoningBudget(body.thinking_token_budget, end_text, end, make_parser, tokenizer)
        params = replace(params, logits_processors=(budget,))
    return OutputPlan(params, make_parser, constraint is not None and bool(tools))


def _tool_choice(body: ChatRequest) -> str | dict[str, Any]:
    """Return whether tools may or must be called: "none", "auto", "required", or the object that names one.

    Raises:
        APIError: a tool must or may be called, and there is no such tool.
    """
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return "auto" if body.tools and choice != "none" else "none"
    if not body.tools:
        raise APIError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, str):
        return choice
    known = [tool.function.name for tool in body.tools]
    for named in choice.allowed_tools.tools if isinstance(choice, AllowedToolChoice) else [choice]:
        if named.function.name not in known:
            raise APIError(400, f"tool_choice: there is no tool {named.function.name!r}", param="tool_choice")
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode
    function: dict[str, Any] = choice.model_dump()
    return function


def _maker(spec: ParserSpec, begun: str, tools: list[dict[str, Any]]) -> Callable[[], OutputParser]:
    return lambda: OutputParser(spec, begun, tools)
