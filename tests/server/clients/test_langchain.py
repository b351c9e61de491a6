"""langchain's ChatOpenAI and OpenAIEmbeddings."""

from typing import Any

import pytest
from pydantic import BaseModel
from support.served import Served

langchain_openai = pytest.importorskip("langchain_openai")
openai = pytest.importorskip("openai")

QUESTION = "Tell me about France."


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


def chat_model(served: Served, **options: Any) -> Any:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "max_retries": 0} | options
    return langchain_openai.ChatOpenAI(
        **{"base_url": served.base, "api_key": served.key, "model": served.model, **fields}
    )


@pytest.mark.parametrize("responses", [False, True])
def test_chat(served: Served, responses: bool) -> None:
    answer = chat_model(served, use_responses_api=responses).invoke([("system", "Be brief."), ("human", QUESTION)])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = served.post("/chat/completions", messages=messages, temperature=0, max_tokens=12)
    assert answer.text == expected["choices"][0]["message"]["content"]
    assert answer.usage_metadata["output_tokens"] == 12


@pytest.mark.parametrize("responses", [False, True])
def test_stream(served: Served, responses: bool) -> None:
    chunks = list(chat_model(served, stream_usage=True, use_responses_api=responses).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == served.chat(QUESTION, max_tokens=12)
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 12


def test_batch(served: Served) -> None:
    answers = chat_model(served).batch([QUESTION, "Name a colour."])
    assert [answer.text for answer in answers] == [
        served.chat(question, max_tokens=12) for question in (QUESTION, "Name a colour.")
    ]


def test_logprobs(served: Served) -> None:
    answer = chat_model(served, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(served: Served, method: str) -> None:
    model = chat_model(served, max_tokens=200).with_structured_output(City, method=method, include_raw=True)
    answer = model.invoke('Name a city. Answer in JSON: {"name": ..., "is_capital": true}')
    assert answer["raw"].text.lstrip().startswith("{")
    if method == "json_schema":
        assert isinstance(answer["parsed"], City)


@pytest.mark.parametrize("responses", [False, True])
def test_tools(served: Served, responses: bool) -> None:
    model = chat_model(served, max_tokens=100, use_responses_api=responses)
    [call] = model.bind_tools([City], tool_choice="City").invoke(QUESTION).tool_calls
    assert City.model_validate(call["args"])
    answer = model.with_structured_output(City, method="function_calling").invoke(QUESTION)
    assert isinstance(answer, City)


def test_embeddings(served: Served) -> None:
    """By default it sends tokens of another tokenizer, which belong to OpenAI's models alone."""
    model = langchain_openai.OpenAIEmbeddings(
        base_url=served.base, api_key=served.key, model=served.model, check_embedding_ctx_length=False
    )
    assert model.embed_query("one") == pytest.approx(served.embedding("one"), abs=1e-6)


def test_errors(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        chat_model(served, model="gpt-4").invoke(QUESTION)
    with pytest.raises(openai.AuthenticationError):
        chat_model(served, api_key="wrong").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError) as refused:
        chat_model(served).invoke(served.too_long)
    assert type(refused.value).__name__ == "OpenAIContextOverflowError"
