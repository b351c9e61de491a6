"""litellm, as a library."""

import json
from typing import Any

import pytest
from pydantic import BaseModel
from support.served import Served

litellm = pytest.importorskip("litellm")

QUESTION = "Tell me about France."
MESSAGES = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture
def options(served: Served) -> dict[str, Any]:
    model = f"hosted_vllm/{served.model}"
    return {"model": model, "api_base": served.base, "api_key": served.key, "temperature": 0, "num_retries": 0}


@pytest.fixture(params=["hosted_vllm", "openai"])
def both(options: dict[str, Any], served: Served, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The two names under which litellm knows servers of this kind."""
    return {**options, "model": f"{request.param}/{served.model}"}


def test_chat(both: dict[str, Any], served: Served) -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=12, **both)
    assert answer.choices[0].message.content == served.chat(QUESTION, max_tokens=12)
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def test_stream(both: dict[str, Any], served: Served) -> None:
    stream = litellm.completion(
        messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}, **both
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == served.chat(
        QUESTION, max_tokens=12
    )
    assert chunks[-1].usage.completion_tokens == 12


def test_structured_output(both: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, max_tokens=60, response_format=City, **both)
    assert City.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(messages=MESSAGES, max_tokens=200, response_format={"type": "json_object"}, **both)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_vllms_fields(options: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=MESSAGES, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, **options
    )
    assert answer.choices[0].message.content in ("yes", "no")


TOOL = {
    "type": "function",
    "function": {"name": "describe_city", "description": "Describe a city.", "parameters": City.model_json_schema()},
}
CHOICE = {"type": "function", "function": {"name": "describe_city"}}


def test_tools(both: dict[str, Any]) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 100, "tools": [TOOL], "tool_choice": CHOICE}
    [call] = litellm.completion(**fields, **both).choices[0].message.tool_calls
    assert call.function.name == "describe_city"
    assert City.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(stream=True, **fields, **both))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in built] == [
        (call.function.name, call.function.arguments)
    ]


def test_text_completion(served: Served, options: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="The capital of France is", max_tokens=5, **options)
    expected = served.post("/completions", prompt="The capital of France is", max_tokens=5, temperature=0)
    assert answer.choices[0].text == expected["choices"][0]["text"]


def test_responses(both: dict[str, Any], served: Served) -> None:
    both.pop("num_retries")
    answer = litellm.responses(input=QUESTION, max_output_tokens=16, **both)  # its smallest number
    assert answer.output[0].content[0].text == served.chat(QUESTION, max_tokens=16)


def test_embedding(both: dict[str, Any], served: Served) -> None:
    both.pop("temperature")
    answer = litellm.embedding(input=["one", "two"], **both)
    assert answer.data[0]["embedding"] == pytest.approx(served.embedding("one"), abs=1e-6)


def test_errors(both: dict[str, Any], served: Served) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**both, "model": both["model"].replace(served.model, "gpt-4")})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=MESSAGES, **{**both, "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": served.too_long}], **both)
    with pytest.raises(litellm.BadRequestError, match="temperature must be"):
        litellm.completion(messages=MESSAGES, **{**both, "temperature": -1})
