"""llama-index's OpenAILike and its embeddings."""

from typing import Any

import pytest
from pydantic import BaseModel
from support.served import Served

pytest.importorskip("llama_index.llms.openai_like")
openai = pytest.importorskip("openai")

QUESTION = "Tell me about France."


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


def language_model(served: Served, **options: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "max_retries": 0, "is_chat_model": True} | options
    return OpenAILike(**{"api_base": served.base, "api_key": served.key, "model": served.model, **fields})


def message(text: str) -> Any:
    from llama_index.core.llms import ChatMessage

    return ChatMessage(role="user", content=text)


def test_chat(served: Served) -> None:
    answer = language_model(served).chat([message(QUESTION)])
    assert answer.message.content == served.chat(QUESTION, max_tokens=12)


def test_stream(served: Served) -> None:
    stream = language_model(served).stream_chat([message(QUESTION)])
    assert "".join(part.delta or "" for part in stream) == served.chat(QUESTION, max_tokens=12)


def test_completion(served: Served) -> None:
    expected = served.post("/completions", prompt="The capital of France is", max_tokens=5, temperature=0)
    model = language_model(served, is_chat_model=False, max_tokens=5)
    assert model.complete("The capital of France is").text == expected["choices"][0]["text"]
    stream = model.stream_complete("The capital of France is")
    assert "".join(part.delta or "" for part in stream) == expected["choices"][0]["text"]


def test_structured_output(served: Served) -> None:
    model = language_model(served, max_tokens=100, should_use_structured_outputs=True)
    assert isinstance(model.structured_predict(City, prompt_template()), City)


def test_tools(served: Served) -> None:
    model = language_model(served, max_tokens=100, is_function_calling_model=True)
    assert isinstance(model.structured_predict(City, prompt_template()), City)


def prompt_template() -> Any:
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate(QUESTION)


def test_embeddings(served: Served) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    model = module.OpenAILikeEmbedding(model_name=served.model, api_base=served.base, api_key=served.key)
    assert model.get_text_embedding("one") == pytest.approx(served.embedding("one"), abs=1e-6)
    assert model.get_text_embedding_batch(["one", "two"])[1] == pytest.approx(served.embedding("two"), abs=1e-6)


def test_errors(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        language_model(served, model="gpt-4").chat([message(QUESTION)])
    with pytest.raises(openai.AuthenticationError):
        language_model(served, api_key="wrong").chat([message(QUESTION)])
    with pytest.raises(openai.BadRequestError) as refused:
        language_model(served).chat([message(served.too_long)])
    assert refused.value.code == "context_length_exceeded"
