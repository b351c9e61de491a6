"""Reads the ``response_template`` of a checkpoint's tokenizer_config.json as a :class:`ParserSpec`.

The format is that of transformers (https://huggingface.co/docs/transformers/main/chat_response_parsing): fields between
markers, with the type of their content, and a template that shapes a tool call from it.
"""

import re
from typing import Any

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.server.parsing.pattern import PatternError, compile_patterns
from fastinfer.server.parsing.spec import (
    ArgumentsObject,
    CallObjects,
    Calls,
    ParserSpec,
    Passage,
    PythonCalls,
    Region,
    TaggedArguments,
)
from fastinfer.server.parsing.value_reader import Syntax
from fastinfer.utils.checks import show

_PASSAGES = {
    "thinking": Passage.REASONING,
    "reasoning": Passage.REASONING,
    "reasoning_content": Passage.REASONING,
    "content": Passage.TEXT,
}
_PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
_VALUE_GROUP = re.compile(r"\(\?P<value>[^()]*\)")
_STARTS_OPEN = re.compile(r"\(\?:\^\|(.*)\)", re.DOTALL)


def read_response_template(template: object) -> ParserSpec:
    """Read a response template.

    Raises:
        CheckpointFormatError: it is malformed.
        UnsupportedModelError: it has a part that is not implemented, or whose search might take more than linear time.
    """
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise CheckpointFormatError(f"response_template: expected an object with fields, got {show(template)}")
    if template.get("version", 1) != 1:
        raise UnsupportedModelError(f"response_template: expected version 1, got {show(template['version'])}")
    if "start_anchor" not in template:
        raise UnsupportedModelError("response_template: expected a start_anchor, got none or a pattern")
    regions: list[Region] = []
    dropped: tuple[str, ...] = ()
    starts_reasoning = False
    for name, field in template["fields"].items():
        place = f"response_template.fields.{name}"
        if not isinstance(field, dict):
            raise CheckpointFormatError(f"{place}: expected an object, got {show(field)}")
        content = _content(name, field, place)
        opening, closing = _marker(field, "open", place), _marker(field, "close", place)
        if opening is None:
            if content is not Passage.TEXT:
                raise UnsupportedModelError(f"{place}: expected a marker that opens it; only content can do without")
            dropped = () if closing is None else (closing,)
            continue
        if match := _STARTS_OPEN.fullmatch(opening):
            opening, starts_reasoning = match[1], content is Passage.REASONING
        end_text = _texts(field["close"], place)[0] if "close" in field else ""
        regions.append(Region(_with_blanks(opening), closing, content, end_text))
    spec = ParserSpec(
        regions=tuple(regions),
        start_anchors=_texts(template["start_anchor"], "response_template.start_anchor"),
        starts_reasoning=starts_reasoning,
        dropped=dropped,
        markers=_literal_markers(template["fields"]),
    )
    _check_patterns(spec)
    return spec


def _content(name: str, field: dict[str, Any], place: str) -> Passage | Calls:
    """Return what a field contains."""
    kind, options = field.get("content", "text"), field.get("content_args", {})
    if not isinstance(options, dict):
        raise CheckpointFormatError(f"{place}.content_args: expected an object, got {show(options)}")
    if name in _PASSAGES:
        if kind != "text":
            raise UnsupportedModelError(f"{place}.content: expected text, got {show(kind)}")
        return _PASSAGES[name]
    if name != "tool_calls":
        raise UnsupportedModelError(f"{place}: expected {', '.join(_PASSAGES)} or tool_calls, got another field")
    if kind == "python-call-list":
        return PythonCalls()
    tool, arguments = _shape(field.get("transform"), place)
    if kind == "xml-inline" and (tool, arguments) == ("{name}", "{content}"):
        return _tagged(options, place)
    if kind == "json":
        syntax = Syntax(delimiters=_delimiters(options, place), bare_keys=options.get("unquoted_keys") is True)
        if (tool, arguments) == ("{name}", "{content}"):
            return ArgumentsObject(syntax)
        keys = [text.removeprefix("{").removesuffix("}").removeprefix("content.") for text in (tool, arguments)]
        return CallObjects(keys[0], (keys[1],), ("id", "type", "tool_call_id"), syntax=syntax)
    raise UnsupportedModelError(f"{place}: tool calls with content {show(kind)} and this transform are not implemented")


def _delimiters(options: dict[str, Any], place: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of texts around strings."""
    pairs = options.get("string_delims", [])
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(_texts(p, place)) == 2 for p in pairs):
        raise CheckpointFormatError(f"{place}.content_args.string_delims: expected pairs of strings, got {show(pairs)}")
    return tuple((opening, ending) for opening, ending in pairs)


def _shape(transform: object, place: str) -> tuple[str, str]:
    """Return the placeholders of the tool's name and of the arguments."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function in ("{content}", None):
        return "{content.name}", "{content.arguments}"
    if isinstance(function, dict):
        shape = function.get("name"), function.get("arguments")
        if all(isinstance(text, str) and _PLACEHOLDER.fullmatch(text) for text in shape):
            return shape  # type: ignore[return-value]
    raise UnsupportedModelError(
        f"{place}.transform: expected a function with name and arguments, got {show(transform)}"
    )


def _tagged(options: dict[str, Any], place: str) -> TaggedArguments:
    """Divide the pattern of a tag at its value."""
    pattern = options.get("tag_pattern")
    if not isinstance(pattern, str) or len(parts := _VALUE_GROUP.split(pattern)) != 2 or "(?P<key>" not in parts[0]:
        raise UnsupportedModelError(
            f"{place}.content_args.tag_pattern: expected groups key, value, got {show(pattern)}"
        )
    return TaggedArguments(parts[0], parts[1])


def _marker(field: dict[str, Any], name: str, place: str) -> str | None:
    """Return the expression of a marker, which is given as one, as a text or as several texts."""
    if (pattern := field.get(f"{name}_pattern")) is not None:
        if not isinstance(pattern, str):
            raise CheckpointFormatError(f"{place}.{name}_pattern: expected a string, got {show(pattern)}")
        return pattern
    if name not in field:
        return None
    texts = sorted(_texts(field[name], f"{place}.{name}"), key=len, reverse=True)
    expression = "|".join(map(re.escape, texts))
    return _with_blanks(f"(?:{expression})")


def _with_blanks(pattern: str) -> str:
    """Let a marker include the white space before it: the text in a field is stripped."""
    return pattern if pattern.startswith(r"\s*") else r"\s*" + pattern


def _texts(value: object, place: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise CheckpointFormatError(f"{place}: expected a string or a list of strings, got {show(value)}")
    return tuple(texts)


def _literal_markers(fields: dict[str, Any]) -> tuple[str, ...]:
    """Return texts between angle or square brackets in all markers, which may be special tokens."""
    found: dict[str, None] = {}
    for field in fields.values():
        for name in ("open", "close", "open_pattern", "close_pattern"):
            value = field.get(name, "")
            for text in value if isinstance(value, list) else [value]:
                found |= dict.fromkeys(re.findall(r"<[^<>()]*>|\[[A-Z_/]+\]", str(text).replace("\\", "")))
    return tuple(found)


def _check_patterns(spec: ParserSpec) -> None:
    """Compile what the parser will search for."""
    try:
        compile_patterns((*(region.open for region in spec.regions), *spec.dropped))
        for region in spec.regions:
            if isinstance(region.content, TaggedArguments):
                compile_patterns(region.content.markers(region.close))
            compile_patterns((region.close,) if region.close else ())
            if spec.starts_reasoning:
                compile_patterns(region.markers_if_begun)
    except PatternError as error:
        raise UnsupportedModelError(f"response_template: {error}") from None
