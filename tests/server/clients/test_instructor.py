"""instructor, which turns answers into pydantic models."""

from typing import Any

import pytest
from pydantic import BaseModel
from support.served import Served

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "Paris is the capital of France."}]


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


def client(served: Served, mode: str, key: str = "") -> Any:
    base = openai.OpenAI(base_url=served.base, api_key=key or served.key, max_retries=0)
    return instructor.from_openai(base, mode=getattr(instructor.Mode, mode))


def options(served: Served) -> dict[str, Any]:
    return {"model": served.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_structured_output(served: Served, mode: str) -> None:
    assert isinstance(client(served, mode).create(response_model=City, **options(served)), City)


def test_json_mode(served: Served) -> None:
    """The schema is a part of the prompt here, which a small model misses: its answer is JSON, whatever it says."""
    raw = client(served, "JSON").create(response_model=None, response_format={"type": "json_object"}, **options(served))
    assert raw.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_partial_stream(served: Served, mode: str) -> None:
    parts = list(client(served, mode).create_partial(response_model=City, **options(served)))
    assert parts[-1].name
    assert parts[-1].is_capital in (True, False)


def test_errors(served: Served) -> None:
    """instructor wraps the errors of the openai package."""
    with pytest.raises(Exception, match="does not exist") as missing:
        client(served, "JSON_SCHEMA").create(response_model=City, **{**options(served), "model": "gpt-4"})
    assert "NotFoundError" in repr(missing.value) + repr(missing.value.__cause__)
    with pytest.raises(Exception, match="API key"):
        client(served, "JSON_SCHEMA", "wrong").create(response_model=City, **options(served))
    long = {**options(served), "messages": [{"role": "user", "content": served.too_long}]}
    with pytest.raises(Exception, match="maximum context length"):
        client(served, "JSON_SCHEMA").create(response_model=City, **long)
