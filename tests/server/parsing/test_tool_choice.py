import json
import random
from typing import Any

import pytest
from support.tool_formats import FORMATS, TOOLS

from fastinfer.errors import RequestError
from fastinfer.server.parsing import SPECS, OutputParser, begun_answer, find_spec
from fastinfer.server.parsing.events import Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from fastinfer.server.parsing.tool_choice import AnswerConstraint, constrain_answer
from fastinfer.structured_output import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")

QWEN3 = find_spec("<think> <tool_call>", {})
NAMED = {"type": "function", "function": {"name": "get_weather"}}
VALID = {
    "get_weather": {"city": "Paris", "days": 3},
    "search": {"query": 'a "b"', "tags": ["x"], "options": {}},
    "now": {},
}


def matcher(constraint: AnswerConstraint) -> Any:
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = constraint.structured_outputs.grammar
    assert grammar is not None
    found = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar)), log_level=0
    )
    assert not found.is_error(), found.get_error()
    return found


def accepts(constraint: AnswerConstraint, text: str) -> bool:
    found = matcher(constraint)
    return all(found.consume_token(byte) for byte in text.encode()) and found.is_accepting()


def generate(constraint: AnswerConstraint, seed: int) -> str:
    """A text of random characters that the grammar allows, mostly those that end a string soon."""
    rng = random.Random(seed)
    found = matcher(constraint)
    text = bytearray()
    while not (found.is_accepting() and rng.random() < 0.3) and not found.is_stopped():
        allowed = [byte for byte in range(32, 127) if found.validate_tokens([byte])]
        allowed += [10] if found.validate_tokens([10]) else []
        allowed = allowed or [byte for byte in range(128, 256) if found.validate_tokens([byte])]
        ending = [byte for byte in allowed if byte in b'"}]<']
        byte = rng.choice(ending if ending and rng.random() < 0.5 else allowed)
        found.consume_token(byte)
        text.append(byte)
        assert len(text) < 5000
    return text.decode()


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    texts = [
        "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == i) for i in range(len(names))
    ]
    return list(zip(names, map(json.loads, texts), strict=True))


def read(constraint: AnswerConstraint, text: str, prompt: str = "") -> list[Event]:
    parser = OutputParser(constraint.spec, begun_answer(constraint.spec, prompt), TOOLS)
    return [*parser.push(text), *parser.finish()]


def constrain(*args: Any, **options: Any) -> AnswerConstraint:
    constraint = constrain_answer(*args, **options)
    assert constraint is not None
    return constraint


@pytest.mark.parametrize("name", [*FORMATS, None])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_is_generated_is_what_the_parser_reads(name: str | None, choice: Any) -> None:
    constraint = constrain(find_spec(FORMATS[name].template, {}) if name else None, TOOLS, choice)
    several = 0
    for seed in range(6):
        events = read(constraint, generate(constraint, seed))
        assert all(isinstance(event, ToolCallStart | ToolCallArguments) for event in events)
        calls = calls_of(events)
        several += len(calls) > 1
        assert calls
        assert {tool for tool, _ in calls} <= ({"get_weather"} if choice is NAMED else VALID.keys())
        assert all("city" in arguments for tool, arguments in calls if tool == "get_weather")
    assert choice == "required" or several == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
        ("mistral_v11", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜>"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
        ),
        (
            "deepseek_v3_1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"),
    ],
)
def test_forced_calls_are_in_the_format_of_the_version(name: str, text: str) -> None:
    constraint = constrain(find_spec(FORMATS[name].template, {}), TOOLS, "required")
    assert accepts(constraint, text)
    assert [name for name, _ in calls_of(read(constraint, text))] == ["now"] * text.count("now")


def test_required_allows_parallel_calls_unless_they_are_turned_off() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(constrain(QWEN3, TOOLS, "required"), text)
    assert accepts(constrain(QWEN3, TOOLS, "required"), f"{text}\n{text}")
    assert accepts(constrain(QWEN3, TOOLS, "required", parallel=False), text)
    assert not accepts(constrain(QWEN3, TOOLS, "required", parallel=False), f"{text}\n{text}")
    assert not accepts(constrain(QWEN3, TOOLS, "required"), "Hello")
    assert not accepts(constrain(QWEN3, TOOLS, NAMED), text)


def test_open_reasoning_is_closed_first() -> None:
    constraint = constrain(QWEN3, TOOLS, "required", in_reasoning=True)
    text = 'Hm, a tool.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(constraint, text)
    events = read(constraint, text, "<|im_start|>assistant\n<think>\n")
    assert events[0] == ReasoningDelta("Hm, a tool.")
    assert calls_of(events) == [("now", {})]


def test_special_tokens_are_generated_as_tokens() -> None:
    constraint = constrain(QWEN3, TOOLS, NAMED, special_tokens={"<tool_call>": 7, "</tool_call>": 8, "</think>": 9})
    grammar = constraint.structured_outputs.grammar
    assert grammar is not None
    assert "<[7]>" in grammar
    assert "<[8]>" in grammar
    assert "<tool_call>" not in grammar
    matcher(constraint)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_other_choices_constrain_nothing(choice: str) -> None:
    assert constrain_answer(QWEN3, TOOLS, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice"), [(TOOLS, {"type": "function", "function": {"name": "f"}}), ([], "required"), (TOOLS, "any")]
)
def test_a_choice_without_its_tool_is_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice: expected"):
        constrain_answer(QWEN3, tools, choice)


def test_a_schema_cannot_change_how_values_are_written() -> None:
    parameters = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    text = '<tool_call>\n{"name": "now", "arguments": {    }}\n</tool_call>'
    assert not accepts(constrain(QWEN3, tools, "required"), text)


CITY = {"properties": {"city": {"type": "string"}}, "required": ["city"]}


def forced(parameters: Any, strict: bool) -> AnswerConstraint:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return constrain(QWEN3, [{"type": "function", "function": function}], "required")


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"description": "Anything."},
        CITY,
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/C", "$defs": {"C": CITY}},
        {"$ref": "#/$defs/C", "$defs": {"C": {"properties": {"city": True, "next": {"$ref": "#/$defs/C"}}}}},
        {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "integer"}]},
        {"oneOf": [{"type": "object"}, {"type": "array"}]},
        {"allOf": [CITY]},
        {"enum": [{"city": "Rome"}, 5, [1], None]},
        {"type": ["object", "null", "array"]},
        {"type": None},
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_arguments_are_an_object_whatever_the_schema_says(parameters: Any, strict: bool) -> None:
    constraint = forced(parameters, strict)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert accepts(constraint, call % '{"city": "Rome"}')
    assert not any(accepts(constraint, call % value) for value in ("5", '"a"', "[1]", "null", "true"))


STRICT = [
    {**tool, "function": {**tool["function"], "strict": tool["function"]["name"] == "get_weather"}} for tool in TOOLS
]


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("", True),
        ("Hello <b>you</b>\n", True),
        ('Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": 3}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> and more', True),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n' * 2, True),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n', False),
    ],
)
def test_a_strict_function_constrains_calls_alone(text: str, is_accepted: bool) -> None:
    assert accepts(constrain(QWEN3, STRICT, "auto"), text) is is_accepted
    assert accepts(constrain(SPECS["hermes"], STRICT, "auto"), text) is is_accepted


@pytest.mark.parametrize("name", FORMATS)
def test_strict_functions_need_a_marker_of_calls(name: str) -> None:
    constraint = constrain_answer(find_spec(FORMATS[name].template, {}), STRICT, "auto")
    assert (constraint is not None) == (name in ("hermes", "mistral_v11", "deepseek_v3", "deepseek_v3_1"))


@pytest.mark.parametrize("name", ["hermes", "mistral_v11", "deepseek_v3", "deepseek_v3_1"])
def test_an_answer_with_one_call_ends_with_it(name: str) -> None:
    spec = find_spec(FORMATS[name].template, {})
    assert spec is not None
    assert spec.markup is not None
    constraint = constrain(spec, TOOLS, "auto", parallel=False)
    call = f"{spec.markup.begin % 'now'}{{}}{spec.markup.end}"
    assert accepts(constraint, "Well.")
    assert accepts(constraint, f"Well. {call}")
    assert not accepts(constraint, f"Well. {call}{call}")
    assert calls_of(read(constraint, f"Well. {call}")) == [("now", {})]


def test_free_text_may_contain_the_other_special_tokens() -> None:
    special_tokens = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9, "<|im_end|>": 10}
    grammar = constrain(QWEN3, STRICT, "auto", special_tokens=special_tokens).structured_outputs.grammar
    assert grammar is not None
    assert "piece: TEXT (<[9]> | <[8]>)" in grammar
    assert "TEXT <[7]>" in grammar
    assert "<[10]>" not in grammar


@pytest.mark.parametrize(
    ("arguments", "is_accepted"),
    [
        ('{"x": {"title": "a"}, "title": 1}', True),
        ('{"x": {}, "title": 1}', False),
        ('{"x": {"title": "a"}, "title": "b"}', False),
    ],
)
def test_only_what_describes_a_schema_is_left_out(arguments: str, is_accepted: bool) -> None:
    """Values, and properties of such a name, are no descriptions."""
    properties = {"x": {"enum": [{"title": "a"}], "title": "X"}, "title": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["x", "title"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraint = constrain_answer(QWEN3, tools, "required")
    assert constraint is not None
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert accepts(constraint, call) is is_accepted


def test_keywords_that_cannot_be_enforced_are_refused_if_a_function_is_strict() -> None:
    def grammar(strict: bool) -> Any:
        parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}]
        return constrain(QWEN3, tools, "required")

    assert accepts(grammar(False), '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>')
    with pytest.raises(AssertionError, match="uniqueItems"):
        matcher(grammar(True))


@pytest.mark.parametrize(
    ("constraint", "valid", "invalid"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 1}', "1"),
        ({"json_object": True}, '{"a": []}', "[]"),
        ({"regex": r"a/b\/c[/]?"}, "a/b/c", "a"),
        ({"regex": "a\nb\\\\/\\n"}, "a\nb\\/\n", "a"),
        ({"choice": ["root ::= x", "no"]}, "root ::= x", "yes"),
        ({"choice": ['"yes"\n', "no"]}, '"yes"\n', "yes"),
    ],
)
def test_a_constrained_text_or_calls(constraint: dict[str, Any], valid: str, invalid: str) -> None:
    text = StructuredOutputsParams(**constraint)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def allows(answer: str, tools: Any = TOOLS, **options: Any) -> bool:
        choice = "auto" if tools else "none"
        if not tools and not options:
            options = {"in_reasoning": True}
            answer = f"</think>{answer}"
        return accepts(constrain(QWEN3, tools, choice, text=text, **options), answer)

    assert allows(valid)
    assert not allows(invalid)
    assert allows(call)
    assert allows(f"{call}\n{call}")
    assert not allows(f"{call}\n{call}", parallel=False)
    assert not allows(call, tools=[])
    assert allows(f"Hm.\n</think>\n\n{valid}", tools=[], in_reasoning=True)
    assert not allows(valid, tools=[], in_reasoning=True)


def test_a_grammar_cannot_be_a_part_of_another_one() -> None:
    with pytest.raises(RequestError, match="structured_outputs: grammar cannot be combined"):
        constrain_answer(QWEN3, [], "none", text=StructuredOutputsParams(grammar='start: "a"'), in_reasoning=True)
    with pytest.raises(RequestError, match="tools: expected no constraint on the text"):
        constrain_answer(SPECS["mistral"], TOOLS, "auto", text=StructuredOutputsParams(json_object=True))


def test_an_answer_behind_reasoning_without_a_known_end_cannot_be_constrained() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    assert OutputParser(SPECS["harmony"], begun_answer(SPECS["harmony"], prompt)).is_reasoning
    with pytest.raises(RequestError, match="cannot be constrained behind"):
        constrain_answer(SPECS["harmony"], TOOLS, "required", in_reasoning=True)


@pytest.mark.parametrize("special_tokens", [{}, {"<think>": 1, "</think>": 2}])
def test_a_model_may_reason_before_it_must_call(special_tokens: dict[str, int]) -> None:
    constraint = constrain(QWEN3, TOOLS, "required", may_reason=True, special_tokens=special_tokens)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(constraint, call)
    assert not accepts(constraint, f"Hm.</think>{call}")
    assert not accepts(constraint, "<think>Hm.</think>")
    if special_tokens:
        assert constraint.structured_outputs.grammar is not None
        assert constraint.structured_outputs.grammar.startswith("start: (<[1]> reasoning <[2]>")
    else:
        assert accepts(constraint, f"<think>Hm.</think>\n\n{call}")
    assert (
        constrain_answer(SPECS["hermes"], [], "none", text=StructuredOutputsParams(regex="a"), may_reason=True) is None
    )
    text = constrain(QWEN3, [], "none", text=StructuredOutputsParams(regex="a"), may_reason=True)
    assert accepts(text, "<think>Hm.</think>a")
    assert accepts(text, "a")
