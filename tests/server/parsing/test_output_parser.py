import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_formats import CALLS, FORMATS, TOOLS, written

from fastinfer.server import parsing
from fastinfer.server.parsing import (
    SPECS,
    OutputParser,
    ParserSpec,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    begun_answer,
    find_spec,
)
from fastinfer.server.parsing.argument_types import ArgumentTypes

QWEN3 = find_spec("<think> <tool_call>", {})
assert QWEN3 is not None


def parse(
    spec: ParserSpec | str, pieces: str | list[str], prompt: str = "", tools: Any = None
) -> list[tuple[str, str] | tuple[str, str, str]]:
    """("reasoning", text), ("text", text) and ("call", name, arguments), in order, with neighbours joined."""
    spec = SPECS[spec] if isinstance(spec, str) else spec
    parser = OutputParser(spec, begun_answer(spec, prompt), tools)
    events = [event for piece in ([pieces] if isinstance(pieces, str) else pieces) for event in parser.push(piece)]
    found: list[list[str]] = []
    num_calls = 0
    for event in [*events, *parser.finish()]:
        match event:
            case ToolCallStart(index, call_id, name):
                assert index == num_calls
                assert call_id
                num_calls += 1
                found.append(["call", name, ""])
            case ToolCallArguments(index, text):
                assert index == num_calls - 1
                assert text
                next(part for part in reversed(found) if part[0] == "call")[2] += text
            case ReasoningDelta(text) | TextDelta(text):
                kind = "text" if isinstance(event, TextDelta) else "reasoning"
                assert text
                if found and found[-1][0] == kind:
                    found[-1][1] += text
                else:
                    found.append([kind, text])
    return [tuple(part) for part in found]  # type: ignore[misc]


def calls_of(parts: list[Any]) -> list[tuple[str, Any]]:
    return [(part[1], json.loads(part[2])) for part in parts if part[0] == "call"]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back_as_the_template_writes_them(name: str) -> None:
    form = FORMATS[name]
    spec = find_spec(form.template, {})
    assert spec is not None
    assert spec.regions == SPECS[form.name].regions
    parts = parse(spec, written(name), form.header, TOOLS)
    assert calls_of(parts) == CALLS
    assert [part for part in parts if part[0] != "call"] == []


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("llama3_json", "pythonic", "harmony")])
def test_text_may_come_before_calls(name: str) -> None:
    parts = parse(FORMATS[name].name, written(name, "Let me see."), "", TOOLS)
    assert parts[0] == ("text", "Let me see.")
    assert calls_of(parts) == CALLS


def damaged(text: str, rng: random.Random) -> str:
    """The text with a few changes, perhaps cut."""
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(['"', "}", "<", " ", "]", "\\", ""]) + text[place + rng.randrange(3) :]
    return text[: rng.choice([len(text), rng.randrange(len(text) + 1)])]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_events_do_not_depend_on_how_the_text_is_divided(name: str, seed: int) -> None:
    """Also of texts that are cut, and damaged in places."""
    rng = random.Random(seed)
    text = damaged("<think>\nHm.</think>\n\n" + written(name), rng)
    spec = find_spec("<think>" + FORMATS[name].template, {})
    assert spec is not None
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 60)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(spec, text, tools=TOOLS)
    assert parse(spec, pieces, tools=TOOLS) == whole
    assert parse(spec, list(text), tools=TOOLS) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_json_or_the_beginning_of_it(name: str) -> None:
    """Whatever the model writes. llguidance follows the grammar of JSON."""
    llguidance = pytest.importorskip("llguidance")
    blanks = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]*"}
    grammar = llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=blanks)
    tokenizer = llguidance.LLTokenizer("byte")
    rng = random.Random(name)
    calls, num_cut = [], 0
    for _ in range(60):
        calls += [part for part in parse(FORMATS[name].name, damaged(written(name), rng)) if part[0] == "call"]
    for _, _, arguments in calls:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert all(matcher.consume_token(byte) for byte in arguments.encode()), arguments
        num_cut += not matcher.is_accepting()
    assert len(calls) > 60
    assert 5 < num_cut < len(calls)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": 1}'),
                *("}", "\n", " ", "text", "<", '"', "\\", "[", "<tool", "_call>", "é"),
            ]
        ),
        max_size=30,
    )
)
def test_nothing_raises_and_no_text_is_lost(pieces: list[str]) -> None:
    """Everything but white space and markers comes out; the arguments of calls are JSON or a beginning of it."""
    parts = parse(QWEN3, pieces)
    assert parse(QWEN3, "".join(pieces)) == parts
    words = "".join(pieces).count("text"), "".join(pieces).count("é")
    joined = "".join("".join(part[1:]) for part in parts)
    assert (joined.count("text"), joined.count("é")) == words


def test_plain_text_is_passed_on_as_it_is() -> None:
    text = "  \n <b>a</b> {x} [1] <tool_cal </think> \n "
    assert parse(QWEN3, list(text)) == [("text", text)]


def test_text_is_not_held_back_without_need() -> None:
    parser = OutputParser(QWEN3)
    assert parser.push("Hello") == [TextDelta("Hello")]
    assert parser.push(" <") == []
    assert parser.push("b>") == [TextDelta(" <b>")]


def test_arguments_are_streamed() -> None:
    parser = OutputParser(QWEN3)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    start, arguments = parser.push('{"city": "Par')
    assert isinstance(start, ToolCallStart)
    assert start.name == "f"
    assert arguments == ToolCallArguments(0, '{"city": "Par')
    assert parser.push('is"}') == [ToolCallArguments(0, 'is"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


def test_strings_between_tags_are_streamed() -> None:
    parser = OutputParser(SPECS["qwen3_coder"], tools=TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.push('Par"') == [ToolCallArguments(0, 'Par\\"')]
    assert parser.push("is\n</parameter>\n</function>\n</tool_call>") == [ToolCallArguments(0, 'is"}')]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("<|im_start|>assistant\n<think>", "\nHm.</think>Hi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi.", [("text", "Hi.")]),
        ("<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("<|im_start|>assistant\n<think>\nHm, ", "so.</think>", [("reasoning", "so.")]),
        ("<|im_start|>assistant\nSure <thi", "Hi.", [("text", "Hi.")]),
        # A user's words open nothing.
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "Hi.", [("text", "Hi.")]),
        ("<|im_start|>assistant\n<think>\n", "never ends", [("reasoning", "never ends")]),
    ],
)
def test_a_prompt_may_begin_the_answer(prompt: str, text: str, expected: list[Any]) -> None:
    assert parse(QWEN3, text, prompt) == expected
    assert parse(QWEN3, list(text), prompt) == expected


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("", "\n <think>Hm.</think>Hi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("", "Hm.\n</think>\n\nHi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("<think>\n", "Hm.</think>Hi.", [("reasoning", "Hm."), ("text", "Hi.")]),
        ("<thi", "nk>Hm.</think>Hi.", [("reasoning", "nk>Hm."), ("text", "Hi.")]),
        ("Well, ", "<think> is a tag.</think>Hi.", [("reasoning", "<think> is a tag."), ("text", "Hi.")]),
        ("", "A <think> is a tag.</think>Hi.", [("reasoning", "A <think> is a tag."), ("text", "Hi.")]),
        ("", "<think></think>Hi.", [("text", "Hi.")]),
        ("", "<thinking>", [("reasoning", "<thinking>")]),
    ],
)
def test_reasoning_that_begins_without_a_mark_may_have_one(begun: str, text: str, expected: list[Any]) -> None:
    spec = find_spec(None, {}, "none", "deepseek_r1")
    assert spec is not None
    prompt = f"<｜Assistant｜>{begun}"
    assert OutputParser(spec, begun).is_reasoning
    assert parse(spec, text, prompt) == expected
    assert parse(spec, list(text), prompt) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>oops</tool_call>",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "surprise": {}}</tool_call>',
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"arguments": {"a": 1}, "name": "f',
    ],
)
def test_a_malformed_call_is_text(text: str) -> None:
    assert parse(QWEN3, list(text)) == [("text", text)]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
    ],
)
def test_arguments_may_come_first_or_be_left_out(call: str, arguments: str) -> None:
    assert parse(QWEN3, list(f"<tool_call>{call}</tool_call>")) == [("call", "f", arguments)]


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ('{"a": nope}', '{"a": '),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": 01}', '{"a": '),
        ('{"a": NaN}', '{"a": '),
        ('{"a": "\\u12x4"}', '{"a": "'),
        ('{"a": [1}]', '{"a": [1'),
        ('{"a": ' + "[" * 200, '{"a": ' + "[" * 99),
    ],
)
def test_arguments_that_become_malformed_stay_incomplete(arguments: str, passed_on: str) -> None:
    parts = parse(QWEN3, list(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'))
    assert parts[0] == ("call", "f", passed_on)
    assert parts[1][0] == "text"
    assert parts[1][1].endswith("}</tool_call>")


@pytest.mark.parametrize(
    ("spec", "text", "cut", "ended"),
    [
        ("hermes", 'Hi\n<tool_call>\n{"name": "no', "Hi", 'Hi\n<tool_call>\n{"name": "no'),
        ("llama3_json", '<|python_tag|>{"name', "", '<|python_tag|>{"name'),
        ("llama3_json", '{"name": "no', '{"name": "no', '{"name": "no'),  # which may be any JSON
        ("mistral", '[TOOL_CALLS][{"na', "", '[TOOL_CALLS][{"na'),
    ],
)
def test_a_call_without_a_name_that_is_cut_off_is_dropped(spec: str, text: str, cut: str, ended: str) -> None:
    for is_cut, expected in ((True, cut), (False, ended)):
        parser = OutputParser(SPECS[spec], "", TOOLS)
        events = [*parser.push(text), *parser.finish(is_cut)]
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == expected
        assert all(isinstance(event, TextDelta) for event in events)


@pytest.mark.parametrize("end", ["", "}", "}\n</tool_call>", "}}</tool_call>"])
def test_a_complete_call_does_not_need_a_complete_end(end: str) -> None:
    parts = parse(QWEN3, list('<tool_call>{"name": "f", "arguments": {"a": 1}' + end))
    assert parts[0] == ("call", "f", '{"a": 1}')
    assert parts[1:] == ([("text", "}")] if end.startswith("}}") else [])


@pytest.mark.parametrize("spec", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "parameters": {}}', '{"city": "Paris"}', "[1, 2]", "[Bob(age=3)]", '[{"a": 1}]', "{}"]
)
def test_json_that_calls_no_known_tool_is_text(spec: str, text: str) -> None:
    assert parse(spec, text, tools=TOOLS) == [("text", text)]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(QWEN3, "<think>a</think>" + text, tools=[]) == [("reasoning", "a"), ("text", text)]


def test_a_call_with_what_is_no_character_stays_incomplete() -> None:
    text = r"[now(x='\U00110000')]"
    assert parse("pythonic", text, tools=TOOLS) == [("call", "now", '{"x": "'), ("text", r"\U00110000')]")]


def test_arguments_of_python_are_written_as_json_is() -> None:
    assert parse("pythonic", "[f(a=1,b=[2])]") == [("call", "f", '{"a": 1, "b": [2]}')]


def test_python_is_not_evaluated() -> None:
    text = "[now(x=__import__('os').getcwd())]"
    assert parse("pythonic", text, tools=TOOLS) == [("call", "now", '{"x": '), ("text", "__import__('os').getcwd())]")]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (r"'a\'b\"c\\d\n\x41\u00e9\U0001F600\q'", "a'b\"c\\d\nAé😀\\q"),
        ('"it\'s"', "it's"),
        ("(1, (2,), ())", [1, [2], []]),
        ("{'a': None, \"b\": [True, False, -1.5e-3]}", {"a": None, "b": [True, False, -0.0015]}),
    ],
)
def test_python_values(source: str, value: Any) -> None:
    assert calls_of(parse("pythonic", list(f"[f(x={source})]"))) == [("f", {"x": value})]


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", None, 5),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "boolean"}, True),
        ("True", None, True),
        ("true", {"type": "integer"}, "true"),
        ("null", {"type": ["string", "null"]}, None),
        ('{"a": [1]}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": [1]}),
        ("NaN", None, "NaN"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("[" * 100_000, None, "[" * 100_000),
        ("  two\nlines\n", {"type": "string"}, "  two\nlines\n"),
    ],
)
def test_arguments_between_tags_get_the_type_of_the_schema(raw: str, schema: Any, value: Any) -> None:
    assert read_argument(raw, {"properties": {"x": schema}}) == value


DEFINITIONS = {
    "Zip": {"type": "string"},
    "Flag": {"$ref": "#/$defs/Choices/anyOf/1"},
    "Choices": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "a/b~c d": {"type": "string"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "Last": {"type": "string"},
} | {f"Link{i}": {"$ref": f"#/$defs/Link{i + 1}"} for i in range(5000)} | {
    f"Pair{i}": {"anyOf": [{"$ref": f"#/$defs/Pair{i + 1}"}, {"$ref": f"#/$defs/Pair{i + 1}"}]} for i in range(50)
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("123", {"$ref": "#/$defs/Zip"}, "123"),
        ("1", {"$ref": "#/$defs/Flag"}, True),
        ("007", {"$ref": "#/$defs/Choices"}, 7),
        ("123", {"$ref": "#/$defs/a~1b~0c%20d"}, "123"),
        ("123", {"allOf": [{"$ref": "#/$defs/Zip"}, {"minLength": 1}]}, "123"),
        ("5", {"anyOf": [{"anyOf": [{"type": ["string"]}]}, {"allOf": [{"type": "null"}]}]}, "5"),
        ("None", {"type": "string", "nullable": True}, None),
        ("2", {"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, 2),
        # What says nothing, refers to nothing or to itself: read as JSON.
        ("5", {"$ref": "#/$defs/Loop"}, 5),
        ("5", {"$ref": "#/$defs/None/0"}, 5),
        ("5", {"$ref": "#/$defs/Choices/anyOf/9"}, 5),
        ("5", {"$ref": "http://127.0.0.1:1/x"}, 5),
        ("5", {"$ref": 5, "allOf": 5, "anyOf": [5], "enum": 5, "type": 5}, 5),
        ("5", {"$ref": "#/$defs/Link0"}, 5),
        ("5", {"$ref": "#/$defs/Pair0"}, 5),
        # Values to choose from.
        ("1", {"enum": ["1", "2", None]}, "1"),
        ("null", {"enum": ["1", "2", None]}, None),
        ("5", {"const": "5"}, "5"),
        ("5", {"const": 5.0}, 5),
        ("true", {"anyOf": [{"const": "true"}, {"type": "boolean"}]}, "true"),
        ("false", {"anyOf": [{"const": "true"}, {"type": "boolean"}]}, False),
        ("[1, 2]", {"enum": [[1, 2], {}]}, [1, 2]),
        # What is not written as in JSON.
        ("3.0", {"type": "integer"}, 3),
        ("-2e3", {"type": ["integer", "null"]}, -2000),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3.0", {"type": "number"}, 3.0),
        ("3.0", {"type": ["integer", "string"]}, "3.0"),
        ("007", {"type": "integer"}, 7),
        ("+.5", {"type": "number"}, 0.5),
        ("1e999", {"type": "integer"}, "1e999"),
        ("0" * 5000, {"type": "integer"}, "0" * 5000),
        ("TRUE", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("1", {"type": ["boolean", "integer"]}, 1),
        ("2", {"type": "boolean"}, "2"),
        ("['a', \"it's\", None]", {"type": "array"}, ["a", "it's", None]),
        ("(1, True)", {"type": "array"}, [1, True]),
        ("{'a': [1, {'b': False}]}", {"type": "object"}, {"a": [1, {"b": False}]}),
        ("['a']", {"type": "object"}, "['a']"),
        ("['a'] x", {"type": "array"}, "['a'] x"),
        ("['a']]", {"type": "array"}, "['a']]"),
        ("['a", {"type": "array"}, "['a"),
        ("['\\x4", {"type": "array"}, "['\\x4"),
        ("{1: 2}", {"type": "object"}, "{1: 2}"),
        ("[open('x')]", {"type": "array"}, "[open('x')]"),
        ("['a'," * 20_000, {"type": "array"}, "['a'," * 20_000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("-" * 100_000, {"type": "array"}, "-" * 100_000),
    ],
)  # fmt: skip
def test_arguments_between_tags_are_valid_for_the_schema_if_they_can_be(raw: str, schema: Any, value: Any) -> None:
    read = read_argument(raw, {"properties": {"x": schema}, "$defs": DEFINITIONS})
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/A"},
        {"allOf": [{"properties": {"y": {}}}, {"$ref": "#/$defs/A"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/A"}]},
    ],
)
def test_parameters_may_be_elsewhere_in_the_schema(parameters: Any) -> None:
    definitions = {"A": {"properties": {"x": {"$ref": "#/$defs/Zip"}}}, "Zip": {"type": "string"}}
    assert read_argument("123", {**parameters, "$defs": definitions}) == "123"


def read_argument(raw: str, parameters: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    [(name, arguments)] = calls_of(parse("qwen3_coder", text, tools=tools))
    assert (name, arguments.keys()) == ("f", {"x"})
    return arguments["x"]


@pytest.mark.parametrize(
    "kind", ["", " json", "json", " code", "<|constrain|>json", " <|constrain|>json ", " <|constrain|>"]
)
def test_headers_of_harmony_may_name_the_kind_of_content(kind: str) -> None:
    message = f'{kind}<|message|>{{"a": 1}}'
    messages = [
        f"<|channel|>analysis{message}<|end|>",
        f"<|channel|>final{message}<|end|>",
        f"<|channel|>commentary{message}<|end|>",
        f"<|channel|>commentary to=functions.now {message}<|call|>",
        f"<|channel|>analysis to=functions.now {message}<|call|>",
        f" to=functions.now<|channel|>analysis {message}<|call|>",
    ]
    text = "<|start|>assistant".join(messages)
    expected = [("reasoning", '{"a": 1}'), ("text", '{"a": 1}' * 2), *[("call", "now", '{"a": 1}')] * 3]
    assert parse("harmony", text, tools=TOOLS) == expected
    assert parse("harmony", list(text), tools=TOOLS) == expected


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n", {"city": "Paris", "days": 3}),
        ("<parameter=days>\n3\n<parameter=city>\nParis\n</parameter>\n", {"days": 3, "city": "Paris"}),
        ("<parameter=days>3<parameter=city>\n\nParis\n\n<parameter=x>", {"days": 3, "city": "\nParis\n", "x": ""}),
        ("<parameter=city>\nParis\n", {"city": "Paris"}),
        ("<parameter=days>\n3", {"days": 3}),
        ("<parameter=city>\n<parameter=days>\n", {"city": "", "days": ""}),
        ("<parameter=city>\na < b</param </function\n", {"city": "a < b</param </function"}),
        ("<parameter=city>a</parameter></parameter>\n<parameter=days>3</parameter>", {"city": "a", "days": 3}),
    ],
)
def test_a_value_ends_with_its_end_the_next_argument_or_the_call(body: str, arguments: Any) -> None:
    text = f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>\nDone."
    whole = parse("qwen3_coder", text, tools=TOOLS)
    assert calls_of(whole) == [("get_weather", arguments)]
    assert whole[1:] == [("text", "Done.")]
    assert parse("qwen3_coder", list(text), tools=TOOLS) == whole
    for cut in range(len(text)):
        assert parse("qwen3_coder", [text[:cut], text[cut:]], tools=TOOLS) == whole


def test_line_breaks_in_json_strings_are_escaped() -> None:
    parts = parse(QWEN3, '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>')
    assert calls_of(parts) == [("f", {"a": "x\ny\t"})]


def test_ids_are_unique_and_short_where_templates_require_it() -> None:
    def ids(spec: str, text: str) -> list[str]:
        return [event.id for event in OutputParser(SPECS[spec]).push(text) if isinstance(event, ToolCallStart)]

    mistral = ids("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')
    assert len(set(mistral)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in mistral)
    assert ids("hermes", '<tool_call>{"name": "f", "arguments": {}}')[0].startswith("call_")


def test_special_tokens_are_needed_if_a_marker_is_one() -> None:
    assert SPECS["mistral"].special_markers({"[TOOL_CALLS]": 5, "</s>": 2}) == (5,)
    assert SPECS["hermes"].special_markers({"<|im_end|>": 2}) == ()


def test_a_template_without_markers_has_no_spec() -> None:
    assert find_spec("{{ messages[0].content }}", {}) is None
    assert find_spec(None, {}) is None


def count_lines(function: Callable[[], object]) -> int:
    """The number of lines of the parser that a call executes; a loop of Python counts in each round."""
    folder = str(Path(parsing.__file__).parent)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        lines += event == "line"
        return count

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(previous)
    return lines


def hostile_texts() -> Iterator[tuple[str, str, str]]:
    yield "hermes", "nearly markers", "<tool_cal"
    yield "hermes", "markers", "<tool_call>"
    yield "hermes", "blanks", " \n"
    yield "hermes", "calls without end", '<tool_call>{"name": "f'
    yield "hermes", "calls", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    yield "hermes", "arguments first", '<tool_call>{"arguments": {"a": "'
    yield "qwen3_coder", "functions", "<tool_call><function=f>"
    yield "qwen3_coder", "names", "<function=" + "f" * 50
    yield "qwen3_coder", "parameters", "<tool_call>\n<function=f>\n<parameter=a>\n"
    yield "qwen3_coder", "values", "<function=f><parameter=a><parameter=b>\n\n"
    yield "qwen3_coder", "ends", "</function>        "
    yield "deepseek", "names", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n``"
    yield "mistral", "lists", "[TOOL_CALLS][["
    yield "mistral", "names", "[TOOL_CALLS]aaaaaaaa"
    yield "pythonic", "brackets", "["
    yield "pythonic", "arguments", "[f(a=("
    yield "gemma", "strings", '<|tool_call>call:f{a:<|"|><|"'
    yield "llama3_json", "objects", '{"a":'
    yield "harmony", "headers", "<|channel|>commentary to=functions.f "
    yield "harmony", "channels", "<|channel|>final json "
    yield "harmony", "words", "<|channel|>analysis to=functions.f aaaaaaaa"


@pytest.mark.parametrize(("spec", "kind", "unit"), [pytest.param(*t, id=f"{t[0]}-{t[1]}") for t in hostile_texts()])
@pytest.mark.parametrize("piece", [3, 10**9])
def test_the_work_is_linear(spec: str, kind: str, unit: str, piece: int) -> None:
    def work(length: int) -> int:
        text = (unit * (length // len(unit) + 1))[:length]
        pieces = [text[i : i + piece] for i in range(0, length, piece)]
        return count_lines(lambda: parse(spec, pieces))

    small, large = work(500), work(2000)
    assert large <= 4.5 * small + 500
    assert large <= 400 * 2000


def test_a_large_schema_is_read_once() -> None:
    cases = [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(2000)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"anyOf": cases}}}]

    def work(count: int) -> int:
        text = "<function=f>" + "".join(f"<parameter=x{i % 20}>1</parameter>" for i in range(count))
        return count_lines(lambda: parse("qwen3_coder", text, tools=tools))

    assert work(101) - work(1) < 100 * 2000


def test_definitions_that_refer_to_each_other_are_read_in_any_order() -> None:
    schema = {
        "$defs": {
            "A": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "string"}]},
            "B": {"allOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]},
        },
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"$ref": "#/$defs/B"}},
    }
    for keys in ("xy", "yx"):
        types = ArgumentTypes(schema)
        assert {types[key].to_json("5") for key in keys} == {'"5"'}


def test_definitions_that_arguments_share_are_read_once() -> None:
    shared = {"anyOf": [{"const": f"{i}"} for i in range(2000)]}
    properties = {f"p{i}": {"$ref": "#/$defs/shared", "description": "one of many"} for i in range(100)}
    types = ArgumentTypes({"$defs": {"shared": shared}, "properties": properties})
    types["p0"]
    assert count_lines(lambda: [types[key] for key in properties]) < 100 * 100
    assert types["p7"].to_json("7") == '"7"'


def test_what_is_no_number_is_found_out_in_linear_time() -> None:
    """A million digits take milliseconds; in quadratic time they would take hours."""
    program = (
        "from fastinfer.server.parsing.argument_types import ArgumentTypes\n"
        "number = ArgumentTypes({'properties': {'n': {'type': 'number'}}})['n']\n"
        "assert number.to_json('1' * 10**6 + 'x').startswith('\"1')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("unit", ["<tool_call>", " ", '<tool_call>{"name": "', "[", '{"a":'])
def test_long_texts_come_out_as_they_went_in(unit: str) -> None:
    text = (unit * (2**17 // len(unit) + 1))[: 2**17]
    assert parse("hermes", text) == [("text", text)]
