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
# Keys of a template and of a field, and arguments of each kind of content. Most are read below; ``defaults``,
# ``optional``, ``repeats`` and ``transform_each`` need nothing here.
_KEYS = frozenset({"version", "defaults", "fields", "start_anchor"})
_FIELD_KEYS = frozenset(
    {"open", "open_pattern", "close", "close_pattern", "content", "content_args"}
    | {"repeats", "join", "optional", "transform", "transform_each"}
)
_CONTENT_ARGS = {
    "json": frozenset({"string_delims", "unquoted_keys"}),
    "xml-inline": frozenset({"tag_pattern", "value_parser"}),
}
_DEFAULT_ARGS = {"strip": True, "merge_duplicates": False, "allow_non_json": False}
# The only parser of values that is implemented: without one they are strings.
_JSON_VALUES = {"name": "json", "args": {"allow_non_json": True}}
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
    _check_keys(template, _KEYS, "response_template")
    regions: list[Region] = []
    dropped: tuple[str, ...] = ()
    starts_reasoning = False
    drops_text = True  # as no field takes the text outside the others
    for name, field in template["fields"].items():
        place = f"response_template.fields.{name}"
        if not isinstance(field, dict):
            raise CheckpointFormatError(f"{place}: expected an object, got {show(field)}")
        _check_keys(field, _FIELD_KEYS, place)
        content = _content(name, field, place)
        opening, closing, join = _marker(field, "open", place), _marker(field, "close", place), _join(field, place)
        if opening is None:
            if content is not Passage.TEXT or join:
                raise UnsupportedModelError(
                    f"{place}: expected a marker that opens it; only content without a join can do without"
                )
            dropped = () if closing is None else (closing,)
            drops_text = False
            continue
        if match := _STARTS_OPEN.fullmatch(opening):
            opening = match[1]
            starts_reasoning = starts_reasoning or content is Passage.REASONING
            drops_text = drops_text and content is not Passage.TEXT
        end_text = _texts(field["close"], place)[0] if "close" in field else ""
        regions.append(Region(_with_blanks(opening), closing, content, end_text, join=join))
    spec = ParserSpec(
        regions=tuple(regions),
        start_anchors=_texts(template["start_anchor"], "response_template.start_anchor"),
        starts_reasoning=starts_reasoning,
        dropped=dropped,
        markers=_literal_markers(template["fields"]),
        drops_text=drops_text,
    )
    _check_patterns(spec)
    return spec


def _content(name: str, field: dict[str, Any], place: str) -> Passage | Calls:
    """Return what a field contains."""
    kind, options = field.get("content", "text"), field.get("content_args", {})
    if not isinstance(options, dict):
        raise CheckpointFormatError(f"{place}.content_args: expected an object, got {show(options)}")
    known = _CONTENT_ARGS.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    changed = dict(item for item in options.items() if item not in _DEFAULT_ARGS.items())
    _check_keys(changed, known, f"{place}.content_args")
    if name in _PASSAGES:
        if kind != "text":
            raise UnsupportedModelError(f"{place}.content: expected text, got {show(kind)}")
        if field.get("transform") not in (None, "{content}"):
            raise UnsupportedModelError(f"{place}.transform: expected none, got {show(field['transform'])}")
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


def _check_keys(found: dict[str, Any], known: frozenset[str], place: str) -> None:
    """Require that a part of the template has no other keys than those that are read."""
    if others := [key for key in found if key not in known]:
        raise UnsupportedModelError(f"{place}: expected {', '.join(sorted(known)) or 'nothing'}, got {show(others[0])}")


def _join(field: dict[str, Any], place: str) -> str:
    """Return the text between several regions of a field."""
    join = field.get("join")
    if not isinstance(join, str | None):
        raise CheckpointFormatError(f"{place}.join: expected a string, got {show(join)}")
    return join or ""


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
    values = options.get("value_parser")
    if values not in (None, _JSON_VALUES):
        raise UnsupportedModelError(
            f"{place}.content_args.value_parser: expected none or {show(_JSON_VALUES)}, got {show(values)}"
        )
    return TaggedArguments(parts[0], parts[1], reads_json=values is not None)


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
