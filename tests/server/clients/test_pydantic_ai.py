"""pydantic-ai's agents, with both of OpenAI's interfaces."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from support.served import Served

pydantic_ai = pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

QUESTION = "Tell me about France."


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


def agent(served: Served, kind: str = "chat", max_tokens: int = 12, **options: Any) -> Any:
    from openai import AsyncOpenAI
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    key, name = options.pop("key", served.key), options.pop("model", served.model)
    client = AsyncOpenAI(base_url=served.base, api_key=key, max_retries=0)
    make = models.OpenAIChatModel if kind == "chat" else models.OpenAIResponsesModel
    settings = {"temperature": 0.0, "max_tokens": max_tokens}
    model = make(name, provider=OpenAIProvider(openai_client=client))
    return pydantic_ai.Agent(model, model_settings=settings, retries=0, **options)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_chat(served: Served, kind: str) -> None:
    result = agent(served, kind).run_sync(QUESTION)
    assert result.output == served.chat(QUESTION, max_tokens=12)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_stream(served: Served, kind: str) -> None:
    async def run() -> str:
        async with agent(served, kind).run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(run()) == served.chat(QUESTION, max_tokens=12)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_structured_output(served: Served, kind: str) -> None:
    native = pydantic_ai.NativeOutput(City)
    result = agent(served, kind, 100, output_type=native).run_sync(QUESTION)
    assert isinstance(result.output, City)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_tool_output(served: Served, kind: str) -> None:
    """The answer is a call of a tool that the request forces."""
    assert isinstance(agent(served, kind, 100, output_type=City).run_sync(QUESTION).output, City)


def test_errors(served: Served) -> None:
    error = pydantic_ai.exceptions.ModelHTTPError
    for options, prompt, status in (
        ({"model": "gpt-4"}, QUESTION, 404),
        ({"key": "wrong"}, QUESTION, 401),
        ({}, served.too_long, 400),
    ):
        with pytest.raises(error) as refused:
            agent(served, **options).run_sync(prompt)
        assert refused.value.status_code == status
