import json
from typing import Any

import pytest

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.server.parsing import OutputParser, ToolCallArguments, ToolCallStart, begun_answer, find_spec
from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta

FUNCTION = {"type": "function", "function": "{content}"}
NAME_AND_CONTENT = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}

CHATML: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": THINK,
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": FUNCTION
        },
        "content": {"close": "<|im_end|>"},
    },
}  # fmt: skip


def with_calls(**field: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": {"tool_calls": field}}


def with_args(**content_args: Any) -> dict[str, Any]:
    return with_calls(**{**TAGS, "content_args": {**TAGS["content_args"], **content_args}})


def run(template: dict[str, Any], text: str, prompt: str = "") -> list[Event]:
    spec = find_spec("<tool_call>", {"response_template": template})
    assert spec is not None
    whole, pieces = OutputParser(spec, begun_answer(spec, prompt)), OutputParser(spec, begun_answer(spec, prompt))
    events = [*whole.push(text), *whole.finish()]
    piecewise = [event for character in text for event in pieces.push(character)] + pieces.finish()
    assert summary(piecewise) == summary(events)
    return events


def summary(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return reasoning, "".join(event.text for event in events if isinstance(event, TextDelta)), calls


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in summary(events)[2]]


def test_reasoning_text_and_calls() -> None:
    text = '<think>\nHm.\n</think>\n\nHi. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>'
    events = run(CHATML, text)
    assert summary(events)[:2] == ("Hm.", "Hi.")
    assert calls_of(events) == [("f", {"a": 1})]


def test_the_prompt_may_begin_the_answer() -> None:
    assert summary(run(CHATML, "Hm.</think>Hi.", "<|im_start|>assistant\n<think>\n"))[:2] == ("Hm.", "Hi.")


@pytest.mark.parametrize(
    ("field", "text", "calls"),
    [
        (
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": NAME_AND_CONTENT,
            },
            "<tool_call><function=f>\n<parameter=a>\n x \n</parameter><parameter=b>2</parameter></tool_call>",
            [("f", {"a": "x", "b": 2})],
        ),
        (
            {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
                "close": "<|call|>",
                "content": "json",
                "transform": NAME_AND_CONTENT,
            },
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            [("f", {"a": 1})],
        ),
        (
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAME_AND_CONTENT,
            },
            '<|tool_call>call:f{a:<|"|>it"s<|"|>,b:{c:[1]}}<tool_call|>',
            [("f", {"a": 'it"s', "b": {"c": [1]}})],
        ),
        (
            {
                "open": "<|START_ACTION|>",
                "close": "<|END_ACTION|>",
                "content": "json",
                "transform_each": True,
                "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
            '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>',
            [("f", {"a": 1}), ("g", {})],
        ),
        (
            {
                "open": ["<calls>", "<calls>\n"],
                "close": "</calls>",
                "content": "python-call-list",
                "transform": FUNCTION,
            },
            "<calls>\n[f(a='x')]</calls>",
            [("f", {"a": "x"})],
        ),
    ],
)
def test_formats_of_calls(field: dict[str, Any], text: str, calls: list[Any]) -> None:
    assert calls_of(run(with_calls(**field), text)) == calls


TAGS: dict[str, Any] = {
    "open_pattern": r"<f=(?P<name>\w+)>",
    "close": "</f>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<p (?P<key>\w+)>(?P<value>.*?)</p>"},
    "transform": NAME_AND_CONTENT,
}
JSON_CALLS: dict[str, Any] = {**TAGS, "content": "json", "content_args": {"allow_non_json": False}}
ANSWER: dict[str, Any] = {"open": "<r>", "close": "</r>"}


def reference(template: dict[str, Any], text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the message that transformers reads."""
    response_parser = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    message = response_parser.parse_response(text, template, prefix="A:")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("thinking", ""), message.get("content", ""), calls


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"tool_calls": TAGS}, "<f=f><p a>12</p><p b>true</p></f>", ("", "", [("f", {"a": "12", "b": "true"})])),
        # Without a field for it, text outside the others is dropped.
        ({"tool_calls": JSON_CALLS, "content": ANSWER}, 'No <f=f>{"a": 1} </f> more', ("", "", [("f", {"a": 1})])),
        ({"thinking": THINK, "content": ANSWER}, "Oh <think>Hm.</think> so <r>Hi.</r> end", ("Hm.", "Hi.", [])),
        ({"thinking": THINK, "content": {}}, "<think>Hm.</think> so ", ("Hm.", "so", [])),
        (
            {"thinking": {**THINK, "repeats": True, "join": "\n"}, "content": {**ANSWER, "repeats": True, "join": "+"}},
            "<think>a</think><r>1</r><think>b</think><r>2</r><think>c</think>",
            ("a\nb\nc", "1+2", []),
        ),
    ],
)
def test_messages_are_those_of_transformers(fields: dict[str, Any], text: str, expected: Any) -> None:
    template = {"start_anchor": "A:", "fields": fields}
    reasoning, content, calls = summary(run(template, text))
    assert (reasoning, content.rstrip(), [(name, json.loads(arguments)) for name, arguments in calls]) == expected
    assert reference(template, text) == expected


def test_what_begins_like_a_call_but_is_none_is_not_dropped() -> None:
    template = {"start_anchor": "A:", "fields": {"tool_calls": JSON_CALLS, "content": ANSWER}}
    assert summary(run(template, "Well <f=f>oops</f> no <r>Hi.</r> end")) == ("", " <f=f>oops</f> noHi.", [])


def test_the_text_of_content_that_nothing_opens_is_kept() -> None:
    fields = {"content": {"open_pattern": r"(?:^|<r>)", "close": "</r>"}, "tool_calls": JSON_CALLS}
    assert summary(run({"start_anchor": "A:", "fields": fields}, "Hi.</r>")) == ("", "Hi.</r>", [])


def test_reasoning_that_nothing_opens() -> None:
    fields = {
        "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
    }
    for opening in ("", "<think>\n"):
        text = f"{opening}Hm.</think><response>\nHi.\n</response>"
        events = run({"start_anchor": "Assistant:", "fields": fields}, text)
        assert summary(events)[:2] == ("Hm.", "Hi.")


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("x", CheckpointFormatError, "expected an object with fields"),
        ({"fields": {"content": {}}}, UnsupportedModelError, "start_anchor"),
        ({"start_anchor": "A:", "version": 2, "fields": {}}, UnsupportedModelError, "version 1"),
        ({"start_anchor": "A:", "fields": {"content": "x"}}, CheckpointFormatError, "fields.content"),
        ({"start_anchor": "A:", "fields": {"content": {"close": ""}}}, CheckpointFormatError, "content.close"),
        ({"start_anchor": "A:", "fields": {"mood": THINK}}, UnsupportedModelError, "another field"),
        ({"start_anchor": "A:", "fields": {"thinking": {}}}, UnsupportedModelError, "marker that opens it"),
        (with_calls(**TAGS, mood="good"), UnsupportedModelError, "expected close, .*, got 'mood'"),
        ({**CHATML, "mood": "good"}, UnsupportedModelError, "response_template: expected defaults, .*, got 'mood'"),
        (with_args(merge_duplicates=True), UnsupportedModelError, "content_args: expected .*, got 'merge_duplicates'"),
        (with_args(mood="good"), UnsupportedModelError, "content_args: expected .*, got 'mood'"),
        (with_args(value_parser={"name": "int"}), UnsupportedModelError, "value_parser: expected none or .*, got"),
        (
            with_calls(open="<c>", content="json", content_args={"allow_non_json": True}),
            UnsupportedModelError,
            "allow_",
        ),
        (
            {"start_anchor": "A:", "fields": {"content": {"content_args": {"strip": False}}}},
            UnsupportedModelError,
            "content.content_args: expected nothing, got 'strip'",
        ),
        (
            {"start_anchor": "A:", "fields": {"content": {"repeats": True, "join": "\n"}}},
            UnsupportedModelError,
            "content without a join",
        ),
        (
            {"start_anchor": "A:", "fields": {"content": {**ANSWER, "join": 5}}},
            CheckpointFormatError,
            "content.join: expected a string, got 5",
        ),
        (
            {"start_anchor": "A:", "fields": {"content": {**ANSWER, "transform": {"text": "{content}"}}}},
            UnsupportedModelError,
            "content.transform: expected none",
        ),
        (with_calls(open="<c>", content="kv-lines"), UnsupportedModelError, "kv-lines"),
        (with_calls(open="<c>", content="json", transform="x"), UnsupportedModelError, "transform"),
        (with_calls(open_pattern="(?=x)", content="json"), UnsupportedModelError, "not supported"),
        (with_calls(open_pattern=r"(a)\1", content="json"), UnsupportedModelError, "not supported"),
        (with_calls(open_pattern="(", content="json"), UnsupportedModelError, "does not end"),
        (with_calls(open_pattern="x{9999}", content="json"), UnsupportedModelError, "too large"),
        (with_calls(open_pattern="[z-a]", content="json"), UnsupportedModelError, "bad character range"),
        (
            {"start_anchor": "A:", "fields": {"thinking": {"open_pattern": f"(?:^|{'(' * 8}a{')' * 8})"}}},
            UnsupportedModelError,
            "nested at most 8 deep",
        ),
        (with_calls(open="x", close_pattern="a*", content="json"), UnsupportedModelError, "without any character"),
    ],
)
def test_what_is_malformed_or_not_implemented_is_refused(template: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_spec("<tool_call>", {"response_template": template})
