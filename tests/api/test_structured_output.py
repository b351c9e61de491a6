import json
import math
from typing import Any

import pytest

from fastinfer.errors import RequestError
from fastinfer.structured_output import StructuredOutputsParams

TAG = {"begin": "abc", "schema": {}, "end": ""}


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({}, "none"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
    ],
)
def test_exactly_one_is_given(fields: dict[str, Any], got: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs must have exactly one of .*, got {got}$"):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("field", "refused", "accepted"),
    [
        (
            "json",
            [
                "",
                "{",
                "[]",
                "1",
                "true",
                '{"a": NaN}',
                '{"a": 1e999}',
                '{"a": "\\ud800"}',
                '{"\ud800": 1}',
                1,
                [],
                True,
                b"{}",
                {"a": math.nan},
                {"a": {1, 2}},
                {"a": b""},
                '{"a": ' + "1" * 5000 + "}",
                {"a": "\ud800"},
                "{}{}",
            ],
            [{}, "{}", ' {"type" : "object"}\n', {"enum": ["ü\0", None, 2**70, 1e-300]}],
        ),
        ("regex", ["", 1, ["a"], b"a", "a\ud800", "a" * (2**14 + 1)], ["a", "(", "a" * 2**14]),
        (
            "choice",
            [[], "ab", [""], ["a", 1], [["a"]], {"a": 1}, ["\udfff"], ["a"] * 4097, ["a" * 2**17] * 3, 7],
            [["a"], ("a", "b"), ["a"] * 4096, [" ", "\n\0ü"]],
        ),
        ("grammar", ["", 1, b"root ::= a", "a" * (2**16 + 1), "\ud800"], ["root ::= a", "start: /a/"]),
        ("json_object", [False, 0, "true", {}], [True]),
        (
            "structural_tag",
            [
                {},
                "[]",
                7,
                {"structures": [], "triggers": ["a"]},
                {"structures": [TAG], "triggers": []},
                {"structures": [TAG], "triggers": [""]},
                {"structures": [TAG], "triggers": ["b"]},
                {"structures": [TAG] * 129, "triggers": ["a"]},
                {"structures": [TAG, 1], "triggers": ["a"]},
                {"structures": [TAG | {"schema": "{}"}], "triggers": ["a"]},
                {"structures": [TAG | {"end": None}], "triggers": ["a"]},
                {"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]},
            ],
            [{"structures": [TAG], "triggers": ["a", "x"]}, json.dumps({"structures": [TAG], "triggers": ["ab"]})],
        ),
    ],
)
def test_values(field: str, refused: list[Any], accepted: list[Any]) -> None:
    for value in accepted:
        StructuredOutputsParams(**{field: value})
    for value in refused:
        with pytest.raises(RequestError, match=rf"^{field}[\w.\[\]]* must [^\n]*, got [^\n]{{1,250}}$"):
            StructuredOutputsParams(**{field: value})


def test_equal_however_given() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "ü"}, "a": {"type": "null"}}}
    forms = [schema, json.dumps(schema), json.dumps(schema, indent=2, ensure_ascii=False)]
    assert len({StructuredOutputsParams(json=form) for form in forms}) == 1
    assert StructuredOutputsParams(choice=["a", "b"]) == StructuredOutputsParams(choice=("a", "b"))
    assert hash(StructuredOutputsParams(choice=["a"])) == hash(StructuredOutputsParams(choice=("a",)))
    assert StructuredOutputsParams(regex="a") != StructuredOutputsParams(choice=["a"])


def test_the_order_of_properties_is_kept() -> None:
    """It is the order in which the text has them."""
    first, second = ({"properties": {name: {} for name in names}} for names in ("ba", "ab"))
    assert StructuredOutputsParams(json=first) != StructuredOutputsParams(json=second)
    assert StructuredOutputsParams(json=first).json == '{"properties":{"b":{},"a":{}}}'


def test_the_caller_may_change_what_was_given() -> None:
    schema, choice = {"type": "null"}, ["a"]
    params = [StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choice)]
    before = [hash(p) for p in params]
    schema["type"] = "string"
    choice.append("b")
    assert [hash(p) for p in params] == before


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


def test_depth() -> None:
    StructuredOutputsParams(json=nested(100))
    StructuredOutputsParams(json='{"a": "' + "[{" * 500 + '"}')  # brackets in a string do not nest
    StructuredOutputsParams(json='{"a": "' + '\\"[{\\\\' * 500 + '"}')
    for schema in (nested(101), json.dumps(nested(101)), '{"a": ' + "[" * 100 + "]" * 100 + "}"):
        with pytest.raises(RequestError, match=r"^json must be nested at most 100 deep, got 101$"):
            StructuredOutputsParams(json=schema)


def test_deep_nesting_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own parser recurses, and what that does depends on the limit that the host has set."""

    def parse(*args: object, **options: object) -> None:
        raise AssertionError("was parsed")

    monkeypatch.setattr(json, "loads", parse)
    depth = 100_000
    for text in (
        "[" * depth,
        '{"a":' * (depth // 2),
        "[" * depth + "]" * depth,
        '{"a":' * 40_000 + "1" + "}" * 40_000,
    ):
        with pytest.raises(RequestError, match=r"^json must be nested at most 100 deep, got \d+$"):
            StructuredOutputsParams(json=text)
    with pytest.raises(RequestError, match=r"^json must be nested at most 100 deep, got many more$"):
        StructuredOutputsParams(json=nested(depth))


def test_a_cycle() -> None:
    schema: dict[str, Any] = {}
    schema["a"] = schema
    with pytest.raises(RequestError, match=r"^json must be a dict of JSON values, got one where Circular"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("as_text", [True, False])
def test_size_of_a_schema(as_text: bool) -> None:
    limit = 2**18
    schema = {"description": "x" * (limit - len('{"description":""}'))}
    StructuredOutputsParams(json=schema)
    schema["description"] += "x"
    text = json.dumps(schema, separators=(",", ":"))
    with pytest.raises(RequestError, match=f"^json must have at most {limit} characters, got {limit + 1}$"):
        StructuredOutputsParams(json=text if as_text else schema)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        StructuredOutputsParams(regex="a").regex = "b"  # type: ignore[misc]
