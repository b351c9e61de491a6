"""Markers of reasoning and tool calls in known families of models.

The formats are those of the models' own chat templates and documentation.
"""

from dataclasses import replace
from typing import Any

from fastinfer.server.parsing.response_template import read_response_template
from fastinfer.server.parsing.spec import (
    ArgumentsObject,
    CallMarkup,
    CallObjects,
    ParserSpec,
    Passage,
    PythonCalls,
    Region,
    TaggedArguments,
)
from fastinfer.server.parsing.value_reader import Syntax

# Where the model's answer begins in the prompts of common templates.
_ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|header_start|>assistant<|header_end|>",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<|turn>model\n",
    "<tool_response|>",
    "<start_of_turn>model\n",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
    "<|assistant|>",
    "<|start|>assistant",
)
_GEMMA4_VALUES = Syntax(delimiters=(('<|"|>', '<|"|>'),), bare_keys=True)
_FUNCTION_GEMMA_VALUES = Syntax(delimiters=(("<escape>", "<escape>"),), bare_keys=True)
_NAME = r"(?P<name>[\w.:/-]+)"
# The end of a header, before which the model may name the kind of its content, such as json or code.
_HARMONY_MESSAGE = r"\s*(?:<\|constrain\|>)?\w*\s*<\|message\|>"

# Names of parsers that stand for none of those below.
AUTO, OFF = "auto", "none"

_THINK = Region(r"\s*<think>", r"\s*</think>", Passage.REASONING, "</think>", "<think>")
_MISTRAL_THINK = Region(r"\s*\[THINK\]", r"\s*\[/THINK\]", Passage.REASONING, "[/THINK]", "[THINK]")
_GEMMA_THINK = Region(
    r"\s*<\|channel>thought\n?", r"\s*<channel\|>", Passage.REASONING, "<channel|>", "<|channel>thought\n"
)

# By the marker that a template contains if its model reasons.
_REASONING = {"<think>": _THINK, "[THINK]": _MISTRAL_THINK, "<|channel>": _GEMMA_THINK}
# By the names of reasoning parsers: the marker that opens the region, which DeepSeek R1 leaves out, and the region.
REASONING: dict[str, tuple[str, Region]] = {
    "qwen3": ("<think>", _THINK),
    "deepseek_r1": ("<think>", _THINK),
    "mistral": ("[THINK]", _MISTRAL_THINK),
    "gemma": ("<|channel>", _GEMMA_THINK),
}

SPECS: dict[str, ParserSpec] = {
    # Also Qwen 2.5 and 3.
    "hermes": ParserSpec(
        regions=(Region(r"\s*<tool_call>", r"\s*</tool_call>", CallObjects()),),
        start_anchors=_ANCHORS,
        markup=CallMarkup(
            '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>"
        ),
        markers=("<tool_call>", "</tool_call>"),
    ),
    "qwen3_coder": ParserSpec(
        regions=(
            Region(
                r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                r"\s*</function>(?:\s{0,8}</tool_call>)?",
                TaggedArguments(r"<parameter=(?P<key>[^>\n]+)>\n?", r"\n?</parameter>"),
            ),
        ),
        start_anchors=_ANCHORS,
        markers=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ParserSpec(
        regions=(
            Region(r"\s*<\|python_tag\|>", None, CallObjects(separator=";")),
            Region(r"^\s*(?P<body>\{)", None, CallObjects(separator=";")),
        ),
        start_anchors=_ANCHORS,
        markup=CallMarkup('{"name": "%s", "parameters": ', "}", separator="; "),
        markers=("<|python_tag|>",),
    ),
    "mistral": ParserSpec(
        regions=(
            Region(r"\s*\[TOOL_CALLS\]\s*(?P<body>\[)", None, CallObjects()),
            Region(rf"\s*\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?P<body>\{{)", None, ArgumentsObject()),
            Region(rf"\s*\[TOOL_CALLS\]\s*{_NAME}(?P<body>\{{)", None, ArgumentsObject()),
        ),
        start_anchors=_ANCHORS,
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_ids=True,
    ),
    # Gemma 4 and FunctionGemma.
    "gemma": ParserSpec(
        regions=(
            Region(rf"\s*<\|tool_call>call:{_NAME}(?P<body>\{{)", r"\s*<tool_call\|>", ArgumentsObject(_GEMMA4_VALUES)),
            Region(
                rf"\s*<start_function_call>call:{_NAME}(?P<body>\{{)",
                r"\s*<end_function_call>",
                ArgumentsObject(_FUNCTION_GEMMA_VALUES),
            ),
        ),
        start_anchors=_ANCHORS,
        dropped=(r"\s*<turn\|>", r"\s*<\|tool_response>", r"\s*<start_function_response>"),
        markers=(
            *("<|tool_call>", "<tool_call|>", '<|"|>'),
            *("<start_function_call>", "<end_function_call>", "<escape>"),
        ),
    ),
    # V3 and R1 write the arguments in a fenced block, V3.1 behind the name.
    "deepseek": ParserSpec(
        regions=(
            Region(
                r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\s*(?P<body>\{)",
                r"\s*```\s*<｜tool▁call▁end｜>",
                ArgumentsObject(),
            ),
            Region(
                r"\s*<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>\s*(?P<body>\{)",
                r"\s*<｜tool▁call▁end｜>",
                ArgumentsObject(),
            ),
        ),
        start_anchors=_ANCHORS,
        dropped=(r"\s*<｜tool▁calls▁begin｜>", r"\s*<｜tool▁calls▁end｜>"),
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
    ),
    # Llama 4 and LFM2.
    "pythonic": ParserSpec(
        regions=(
            Region(r"\s*<\|tool_call_start\|>", r"\s*<\|tool_call_end\|>", PythonCalls()),
            Region(r"\s*<\|python_start\|>", r"\s*<\|python_end\|>", PythonCalls()),
            Region(r"^\s*(?P<body>\[)", None, PythonCalls()),
        ),
        start_anchors=_ANCHORS,
        markers=("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>"),
    ),
    # gpt-oss.
    "harmony": ParserSpec(
        regions=(
            Region(
                r"(?:<\|channel\|>(?:analysis|commentary)\s*)?"
                rf"to=functions\.{_NAME}(?:<\|channel\|>\w+)?{_HARMONY_MESSAGE}",
                r"\s*<\|call\|>",
                ArgumentsObject(),
            ),
            Region(rf"<\|channel\|>analysis{_HARMONY_MESSAGE}", r"<\|end\|>", Passage.REASONING),
            Region(rf"<\|channel\|>(?:final|commentary){_HARMONY_MESSAGE}", r"<\|(?:end|return)\|>", Passage.TEXT),
        ),
        start_anchors=_ANCHORS,
        dropped=(r"<\|start\|>assistant\s?",),
        # A call ends the turn.
        markup=CallMarkup(
            "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", "<|call|>", separator=None
        ),
        markers=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    ),
}


def _json_list(before: str) -> CallMarkup:
    return CallMarkup('{"name": "%s", "arguments": ', "}", before=before, after="]", separator=", ")


# How calls are forced in formats that have changed: a text of the chat templates of each version, and its markup.
_MARKUPS: dict[str, tuple[tuple[str, CallMarkup], ...]] = {
    "mistral": (
        ("[ARGS]", CallMarkup("[TOOL_CALLS]%s[ARGS]", "", trigger="[TOOL_CALLS]")),
        ("[TOOL_CALLS] [", _json_list("[TOOL_CALLS] [")),
        ("[TOOL_CALLS][", _json_list("[TOOL_CALLS][")),
    ),
    "deepseek": (
        (
            "```json",
            CallMarkup(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
                "\n```<｜tool▁call▁end｜>",
                before="<｜tool▁calls▁begin｜>",
                after="<｜tool▁calls▁end｜>",
                separator="\n",
                trigger="<｜tool▁call▁begin｜>",
            ),
        ),
        (
            "",
            CallMarkup(
                "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                before="<｜tool▁calls▁begin｜>",
                after="<｜tool▁calls▁end｜>",
                trigger="<｜tool▁call▁begin｜>",
            ),
        ),
    ),
}

# Texts of chat templates by which a format is recognised, the most specific ones first.
_SIGNATURES: tuple[tuple[str, str], ...] = (
    ("<|channel|>analysis", "harmony"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", OFF),  # GLM's, which begin as those of Hermes do
    ("<tool_call>", "hermes"),
    ("<|tool_call_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)


def find_spec(
    chat_template: str | None,
    tokenizer_config: dict[str, Any],
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ParserSpec | None:
    """Return how a model marks the parts of its output, or ``None`` if nothing of it is recognised.

    Args:
        chat_template: Jinja source of the model's template, in which the formats leave their markers.
        tokenizer_config: the checkpoint's tokenizer_config.json; its ``response_template``, if it has one, is used.
        tool_call_parser, reasoning_parser: what to use instead: a key of ``SPECS``, and of ``REASONING``; ``OFF`` for
            none; ``AUTO`` for what is found.

    Raises:
        CheckpointFormatError: the response template is malformed.
        UnsupportedModelError: it has a part that is not implemented.
    """
    response_template = tokenizer_config.get("response_template")
    if response_template is not None and (tool_call_parser, reasoning_parser) == (AUTO, AUTO):
        return read_response_template(response_template)
    template = chat_template or ""
    if reasoning_parser == AUTO:
        reasoning = {marker: region for marker, region in _REASONING.items() if marker in template}
    else:
        reasoning = {} if reasoning_parser == OFF else dict([REASONING[reasoning_parser]])
    name = tool_call_parser
    if name == AUTO:
        name = next((name for text, name in _SIGNATURES if text in template), OFF)
    if name == OFF and not reasoning:
        return None
    spec = ParserSpec(regions=(), start_anchors=_ANCHORS) if name == OFF else SPECS[name]
    markups = (markup for text, markup in _MARKUPS.get(name, ()) if text in template)
    passages = () if reasoning_parser == OFF else reasoning.values()
    regions = [r for r in spec.regions if r.content is not Passage.REASONING or reasoning_parser != OFF]
    return replace(
        spec,
        regions=(*passages, *regions),
        starts_reasoning=reasoning_parser == "deepseek_r1",
        markup=next(markups, spec.markup),
        markers=(*reasoning, *(region.end_text for region in reasoning.values()), *spec.markers),
    )
