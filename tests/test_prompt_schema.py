"""Prompt schemas: what they consist of, and how they are read from JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastinfer import PromptModule, PromptParameter, PromptSchema, PromptUnion, RequestError

VALUES: dict[str, Any] = {
    "recomputed_blocks": 2,
    "parts": [
        {"module": "rules", "text": "Be brief. "},
        {"parameter": "city", "max_tokens": 8},
        {"union": [{"module": "free", "text": "The plan is free."}, {"module": "paid", "text": "The plan is paid."}]},
    ],
}
SCHEMA = PromptSchema(
    (
        PromptModule("rules", "Be brief. "),
        PromptParameter("city", 8),
        PromptUnion((PromptModule("free", "The plan is free."), PromptModule("paid", "The plan is paid."))),
    ),
    recomputed_blocks=2,
)


def test_a_schema_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(VALUES))
    assert PromptSchema.from_file(path) == SCHEMA
    assert PromptSchema.from_dict({"parts": []}).recomputed_blocks == 1
    path.write_text("{")
    for name in (path, tmp_path / "none"):
        with pytest.raises(RequestError, match="schema must be a JSON file, got"):
            PromptSchema.from_file(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "schema must have parts, and may have recomputed_blocks, got"),
        ({"parts": [], "name": "a"}, "schema must have parts, and may have recomputed_blocks, got"),
        ({"parts": {}}, "parts must be a list, got"),
        ({"parts": [{"module": "a"}]}, "a part must have module and text, parameter and max_tokens, or union, got"),
        ({"parts": [3]}, "a part must have module and text, parameter and max_tokens, or union, got 3"),
        ({"parts": [{"module": 3, "text": ""}]}, "module must be a string, got 3"),
        ({"parts": [{"module": "a", "text": None}]}, "text of module 'a' must be a string, got None"),
        ({"parts": [{"parameter": "a", "max_tokens": 0}]}, "max_tokens of parameter 'a' must be an integer in 1.."),
        ({"parts": [{"union": "a"}]}, "union must be a list, got 'a'"),
        ({"parts": [{"union": [VALUES["parts"][1]]}]}, "modules of a union must be a tuple of PromptModule, got"),
        ({"parts": [VALUES["parts"][0]] * 2}, "names of a schema must differ, got 'rules' twice"),
        ({"parts": [], "recomputed_blocks": -1}, "recomputed_blocks must be an integer in 0.."),
    ],
)
def test_values_that_are_no_schema(values: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PromptSchema.from_dict(values)


def test_a_prompt_has_the_modules_outside_of_unions() -> None:
    assert SCHEMA.prompt("Hello").modules == {"rules"}
    assert SCHEMA.prompt("Hello", modules=[]).modules == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["free", "paid"]}, "modules must have at most one of a union, got free, paid"),
        ({"modules": ["city"]}, "modules must be among free, paid, rules, got 'city'"),
        ({"modules": 5}, "modules must be a list of names, got 5"),
        ({"modules": "rules"}, "modules must be a list of names, got 'rules'"),
        ({"modules": [["rules"]]}, r"a name in modules must be a string, got \['rules'\]"),
        ({"parameters": ["city"]}, r"parameters must be a dict of values by name, got \['city'\]"),
        ({"parameters": {"rules": "a"}}, "parameters must be among city, got 'rules'"),
        ({"parameters": {"city": 3}}, "city must be a string, got 3"),
        ({"cache_salt": None}, "cache_salt must be a string, got None"),
        ({"text": b"a"}, "text must be a string, got b'a'"),
    ],
)
def test_prompts_that_the_schema_does_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SCHEMA.prompt(**{"text": "Hello", **options})
