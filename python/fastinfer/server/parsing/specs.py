"""How known families of models mark their reasoning and their tool calls.

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

# By the marker that a template contains if its model reasons.
_REASONING = {
    "<think>": Region(r"\s*<think>", r"\s*</think>", Passage.REASONING, "</think>"),
    "[THINK]": Region(r"\s*\[THINK\]", r"\s*\[/THINK\]", Passage.REASONING, "[/THINK]"),
    "<|channel>": Region(r"\s*<\|channel>thought\n?", r"\s*<channel\|>", Passage.REASONING, "<channel|>"),
}

SPECS: dict[str, ParserSpec] = {
    # Also Qwen 2.5 and 3.
    "hermes": ParserSpec(
        regions=(Region(r"\s*<tool_call>", r"\s*</tool_call>", CallObjects()),),
        start_anchors=_ANCHORS,
        markup=CallMarkup('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", separator="\n"),
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
                rf"(?:<\|channel\|>commentary\s*)?to=functions\.{_NAME}(?:<\|channel\|>\w+)?"
                r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                r"\s*<\|call\|>",
                ArgumentsObject(),
            ),
            Region(r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>", Passage.REASONING),
            Region(r"<\|channel\|>(?:final|commentary)<\|message\|>", r"<\|(?:end|return)\|>", Passage.TEXT),
        ),
        start_anchors=_ANCHORS,
        dropped=(r"<\|start\|>assistant\s?",),
        markers=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
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
    ("<tool_call>", "hermes"),
    ("<|tool_call_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)


def find_spec(chat_template: str | None, tokenizer_config: dict[str, Any]) -> ParserSpec | None:
    """Return how a model marks the parts of its output, or ``None`` if nothing of it is recognised.

    Args:
        chat_template: Jinja source of the model's template, in which the formats leave their markers.
        tokenizer_config: the checkpoint's tokenizer_config.json; its ``response_template``, if it has one, is used.

    Raises:
        CheckpointFormatError: the response template is malformed.
        UnsupportedModelError: it has a part that is not implemented.
    """
    if (response_template := tokenizer_config.get("response_template")) is not None:
        return read_response_template(response_template)
    template = chat_template or ""
    reasoning = {marker: region for marker, region in _REASONING.items() if marker in template}
    name = next((name for text, name in _SIGNATURES if text in template), None)
    if name is None and not reasoning:
        return None
    spec = ParserSpec(regions=(), start_anchors=_ANCHORS) if name is None else SPECS[name]
    markers = (*reasoning, *(region.end_text for region in reasoning.values()))
    return replace(spec, regions=(*reasoning.values(), *spec.regions), markers=(*markers, *spec.markers))
