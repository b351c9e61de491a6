"""The openai package against a server on a socket; raw answers are validated strictly against the package's models."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.toy import ToyTokenizer, greedy, logits_of
from support.toy_server import NAME, toy_server

PROMPT = ToyTokenizer().encode("hello,")
MESSAGES: Any = [{"role": "user", "content": "hello"}]
EXTRA = {"ignore_eos": True, "skip_special_tokens": False}
TOKENS = greedy(PROMPT, 12, stop_at_eos=False)
TEXT = ToyTokenizer().decode(TOKENS, skip_special_tokens=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server(api_keys=("secret",)) as (_, address):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        yield client


def raw(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers={"Authorization": "Bearer secret"}, timeout=30)


def data_of(answer: httpx.Response) -> list[str]:
    """The data of a stream's frames."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block.startswith("data: ")]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=MESSAGES, temperature=0, max_completion_tokens=12, extra_body=EXTRA
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(PROMPT) + 12


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=EXTRA,
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 7},
        {"logprobs": True, "top_logprobs": 3},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": True, "return_token_ids": True, "prompt_logprobs": 1},
        {"stream_interval": 5},
    ],
)
def test_raw_chats(url: str, options: dict[str, Any]) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **EXTRA, **options}
    chunks = data_of(raw(url, "/v1/chat/completions", {**body, "stream": True}))
    assert chunks.pop() == "[DONE]"
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in chunks:
        parsed = ChatCompletionChunk.model_validate_json(chunk, strict=True)
        assert "usage" in json.loads(chunk) or "stream_options" not in options
        for choice in parsed.choices:
            assert reasons.get(choice.index) is None, "nothing follows a finish reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
    body.pop("stream_options", None)
    whole = raw(url, "/v1/chat/completions", body)
    parsed_whole = ChatCompletion.model_validate_json(whole.content, strict=True)
    assert texts == {choice.index: choice.message.content for choice in parsed_whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in parsed_whole.choices}
    message = whole.json()["choices"][0]["message"]
    assert (message["role"], message["refusal"]) == ("assistant", None)
    assert "logprobs" in whole.json()["choices"][0]


def test_the_same_seed_gives_the_same_texts(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="toy", messages=MESSAGES, temperature=1.5, n=3, seed=seed, max_tokens=12, extra_body=EXTRA
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1) != texts(2)
    assert texts(-1) == texts(-1) != texts(-2)
    assert len(set(texts(1))) == 3


def test_logprobs_have_the_tokens_own_bytes(url: str) -> None:
    """The toy has halves of characters; a client joins the bytes to the text."""
    body = {"messages": MESSAGES, "temperature": 2, "seed": 3, "max_tokens": 80, "logprobs": True, "top_logprobs": 2}
    choice = raw(url, "/v1/chat/completions", {**body, **EXTRA}).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 80
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text == choice["message"]["content"]
    assert any(entry["bytes"] in ([0xC3], [0xA4]) for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model(url: str, stream: bool) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 1, **EXTRA}
    answer = raw(url, "/v1/chat/completions", {**body, "stream": stream})
    objects = [json.loads(data) for data in data_of(answer)[:-1]] if stream else [answer.json()]
    choices = [choice for parsed in objects for choice in parsed["choices"] if choice["logprobs"]]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert len(entries) == 12
    for i, entry in enumerate(entries):
        expected = logits_of(PROMPT + TOKENS[:i]).log_softmax(0).max().item()
        assert math.isclose(entry["logprob"], expected, abs_tol=1e-4)
        assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 2, "temperature": 1}]
)
def test_raw_completions(url: str, options: dict[str, Any], stream: bool) -> None:
    ids = [*ToyTokenizer().encode("hello "), 30, 31]  # two halves of a character
    body = {"model": NAME, "prompt": ids, "max_tokens": 12, "temperature": 0, "seed": 1, **EXTRA, **options}
    answer = raw(url, "/v1/completions", {**body, "stream": stream})
    objects = data_of(answer)[:-1] if stream else [answer.text]
    texts: dict[int, str] = {}
    tokens, offsets, logprobs = [], [], []
    for data in objects:
        # The package's model has no null for the finish reason of a running stream, nor for the log-probability of a
        # prompt's first token, which its interface sends.
        if not stream and "echo" not in options:
            Completion.model_validate_json(data, strict=True)
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["logprobs"]:
                tokens += choice["logprobs"]["tokens"]
                offsets += choice["logprobs"]["text_offset"]
                logprobs += choice["logprobs"]["token_logprobs"]
    if options.get("n") is None:
        generated = ToyTokenizer().decode(greedy(ids, 12, stop_at_eos=False), skip_special_tokens=False)
        assert texts == {0: ("hello ä" if "echo" in options else "") + generated}
    else:
        assert len(set(texts.values())) == 2
    if "logprobs" in options:
        assert len(tokens) == len(offsets) == len(logprobs) == 12 + (len(ids) if "echo" in options else 0)
        assert (logprobs[0] is None) == ("echo" in options)
        for token, offset in zip(tokens, offsets, strict=True):
            assert token.startswith("bytes:") or texts[0][offset:].startswith(token)
        if "echo" in options:
            assert tokens[6:8] == ["bytes:\\xc3", "bytes:\\xa4"]


def test_scoring_as_lm_eval_does(url: str) -> None:
    """Token ids in, echo, and no more than the prompt's own log-probabilities."""
    prompts = [[5, 6, 7, 8], [9, 10]]
    for max_tokens in (0, 1):
        body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
        answer = raw(url, "/v1/completions", body).json()
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            assert len(logprobs) == len(prompt) + max_tokens
            for i in range(1, len(prompt)):
                expected = logits_of(prompt[:i]).log_softmax(0)[prompt[i]].item()
                assert math.isclose(logprobs[i], expected, abs_tol=1e-4)
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens


def test_embeddings(client: openai.OpenAI, url: str) -> None:
    """The package asks for base64 by itself."""
    packed = client.embeddings.create(model="toy", input=["abc", "de"])
    plain = raw(url, "/v1/embeddings", {"input": [[1, 2, 3], [4, 5]], "encoding_format": "float"})
    parsed = CreateEmbeddingResponse.model_validate_json(plain.content, strict=True)
    assert parsed.usage.prompt_tokens == 5
    for one, other in zip(packed.data, parsed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.isclose(sum(x * x for x in one.embedding), 1, rel_tol=1e-5)


def test_models(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "toy"]
    answer = httpx.get(f"{url}/v1/models/{NAME}", headers={"Authorization": "Bearer secret"})
    assert Model.model_validate_json(answer.content, strict=True).id == NAME


def test_errors_are_the_packages_exceptions(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="toy", messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert "temperature must be" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
    ):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="toy", prompt=[1] * 96)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length" in long.value.message


def test_a_response_format_is_enforced(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "integer"}}  # the toy has no brackets: no text can match
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
        )
    assert "cannot be enforced" in refused.value.message
    answer = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        extra_body={"structured_outputs": {"choice": ["yes.", "no."]}},
    )
    assert answer.choices[0].message.content in ("yes.", "no.")
