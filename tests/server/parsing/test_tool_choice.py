import json
import random
from typing import Any

import pytest
from support.tool_formats import TOOLS

from fastinfer.errors import RequestError
from fastinfer.server.parsing import SPECS, OutputParser, find_spec
from fastinfer.server.parsing.events import Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from fastinfer.server.parsing.tool_choice import ToolConstraint, constrain_tool_choice

llguidance = pytest.importorskip("llguidance")

QWEN3 = find_spec("<think> <tool_call>", {})
NAMED = {"type": "function", "function": {"name": "get_weather"}}
VALID = {
    "get_weather": {"city": "Paris", "days": 3},
    "search": {"query": 'a "b"', "tags": ["x"], "options": {}},
    "now": {},
}


def matcher(constraint: ToolConstraint) -> Any:
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = constraint.structured_outputs.grammar
    assert grammar is not None
    found = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar)), log_level=0
    )
    assert not found.is_error(), found.get_error()
    return found


def accepts(constraint: ToolConstraint, text: str) -> bool:
    found = matcher(constraint)
    return all(found.consume_token(byte) for byte in text.encode()) and found.is_accepting()


def generate(constraint: ToolConstraint, seed: int) -> str:
    """A text of random characters that the grammar allows, mostly those that end a string soon."""
    rng = random.Random(seed)
    found = matcher(constraint)
    text = bytearray()
    while not (found.is_accepting() and rng.random() < 0.3) and not found.is_stopped():
        allowed = [byte for byte in range(32, 127) if found.validate_tokens([byte])]
        allowed += [10] if found.validate_tokens([10]) else []
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


def read(constraint: ToolConstraint, text: str, prompt: str = "") -> list[Event]:
    parser = OutputParser(constraint.spec, prompt, TOOLS)
    return [*parser.push(text), *parser.finish()]


def constrain(*args: Any, **options: Any) -> ToolConstraint:
    constraint = constrain_tool_choice(*args, **options)
    assert constraint is not None
    return constraint


@pytest.mark.parametrize("name", [*SPECS, None])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_is_generated_is_what_the_parser_reads(name: str | None, choice: Any) -> None:
    constraint = constrain(SPECS[name] if name else None, TOOLS, choice)
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
    assert constrain_tool_choice(QWEN3, TOOLS, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice"), [(TOOLS, {"type": "function", "function": {"name": "f"}}), ([], "required"), (TOOLS, "any")]
)
def test_a_choice_without_its_tool_is_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice: expected"):
        constrain_tool_choice(QWEN3, tools, choice)


def test_a_schema_cannot_change_how_values_are_written() -> None:
    parameters = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    text = '<tool_call>\n{"name": "now", "arguments": {    }}\n</tool_call>'
    assert not accepts(constrain(QWEN3, tools, "required"), text)
