"""Every route's answers and every kind of frame, strictly: what the interface has and what is listed here, no more."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic.types
import httpx
import pytest
from anthropic.types import ErrorResponse, MessageTokensCount
from openai.pagination import SyncPage
from openai.types import Completion, CreateEmbeddingResponse, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from support.strict import check
from support.toy_server import GatedModel, toy_client

MESSAGES = [{"role": "user", "content": "hello"}]
OPEN = {"ignore_eos": True, "skip_special_tokens": False}
CHAT = {"model": "toy", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
# vLLM's: the token or text that ended a choice, and what the fields return_token_ids and prompt_logprobs ask for.
CHOICE = {"Choice.stop_reason", "Choice.token_ids"}
CHUNK = CHOICE | {"ChatCompletionChunk.prompt_token_ids", "ChatCompletionChunk.prompt_logprobs"}
WHOLE = CHOICE | {"ChatCompletion.prompt_token_ids", "ChatCompletion.prompt_logprobs"}
COMPLETION = {
    f"CompletionChoice.{name}" for name in ("stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
}
RESPONSE = {"Response.store"}  # OpenAI's server sends it
MODEL = {"Model.root", "Model.parent", "Model.input_modalities", "Model.max_model_len"}

Client = httpx.AsyncClient


def run(work: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with toy_client(**options) as client:
            await work(client)

    asyncio.run(main())


def data_of(answer: httpx.Response) -> list[str]:
    """The data of a stream's frames."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = [block.rpartition("data: ") for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    return [data for _, _, data in blocks]


def has_all(value: dict[str, Any], *names: str) -> None:
    """Fields that the interface requires and the package's models have defaults for."""
    assert not set(names) - set(value), value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "temperature": 1, "seed": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "e", "i", "o", "u"][:4]},
        {"return_token_ids": True, "prompt_logprobs": 1},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_chats(options: dict[str, Any]) -> None:
    async def work(client: Client) -> None:
        body = {**CHAT, **OPEN, **options}
        answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
        chunks = data_of(answer)
        assert chunks.pop() == "[DONE]"
        assert chunks
        for chunk in chunks:
            check(ChatCompletionChunk, chunk, CHUNK)
            for choice in json.loads(chunk)["choices"]:
                has_all(choice, "index", "delta", "logprobs", "finish_reason")
        body.pop("stream_options", None)
        answer = await client.post("/v1/chat/completions", json=body)
        check(ChatCompletion, answer.content, WHOLE)
        has_all(answer.json(), "usage", "system_fingerprint")
        for choice in answer.json()["choices"]:
            has_all(choice, "logprobs", "finish_reason")
            has_all(choice["message"], "content", "refusal")
            if choice["logprobs"] is not None:
                has_all(choice["logprobs"], "content", "refusal")

    run(work)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "temperature": 1},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"stop": "a"},
        {"return_token_ids": True, "prompt_logprobs": 1},
        {"stream_options": {"include_usage": True}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_completions(options: dict[str, Any]) -> None:
    """The package's model has no null for the finish reason of a running stream, nor for the log-probability of a
    prompt's first token, which OpenAI's server sends.
    """

    def check_completion(data: str) -> None:
        content = json.loads(data)
        for choice in content["choices"]:
            has_all(choice, "logprobs", "finish_reason", "text", "index")
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] is not None and "echo" in options:
                choice["logprobs"]["token_logprobs"] = [x or 0.0 for x in choice["logprobs"]["token_logprobs"]]
                choice["logprobs"]["top_logprobs"] = [x or {} for x in choice["logprobs"]["top_logprobs"]]
        check(Completion, json.dumps(content), COMPLETION)

    async def work(client: Client) -> None:
        body = {"model": "toy", "prompt": "hello", "max_tokens": 6, "temperature": 0, **OPEN, **options}
        frames = data_of(await client.post("/v1/completions", json={**body, "stream": True}))
        assert frames.pop() == "[DONE]"
        assert frames
        for frame in frames:
            check_completion(frame)
        body.pop("stream_options", None)
        answer = await client.post("/v1/completions", json=body)
        check_completion(answer.text)
        has_all(answer.json(), "usage")

    run(work)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"instructions": "a", "metadata": {"a": "b"}},
        {"text": {"format": {"type": "text"}}},
        {"max_output_tokens": 40},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_responses(options: dict[str, Any]) -> None:
    async def work(client: Client) -> None:
        body = {"model": "toy", "input": "hello", "max_output_tokens": 6, "temperature": 0, **options}
        answer = await client.post("/v1/responses", json=body)
        check(Response, answer.content, RESPONSE)
        frames = data_of(await client.post("/v1/responses", json={**body, "stream": True}))
        assert frames
        for number, frame in enumerate(frames):
            assert check(ResponseStreamEvent, frame, RESPONSE).sequence_number == number
        count = await client.post("/v1/responses/input_tokens", json={"model": "toy", "input": "hello"})
        check(InputTokenCountResponse, count.content)

    run(work)


@pytest.mark.parametrize("options", [{}, {"system": "a"}, {"stop_sequences": ["a", "e"]}, {"max_tokens": 60}])
def test_messages(options: dict[str, Any]) -> None:
    async def work(client: Client) -> None:
        body = {**CHAT, **options}
        answer = await client.post("/v1/messages", json=body)
        check(anthropic.types.Message, answer.content)
        frames = data_of(await client.post("/v1/messages", json={**body, "stream": True}))
        assert frames
        for frame in frames:
            if frame != '{"type":"ping"}':  # the package drops it before its models
                check(anthropic.types.RawMessageStreamEvent, frame)
        count = await client.post("/v1/messages/count_tokens", json={"model": "toy", "messages": MESSAGES})
        check(MessageTokensCount, count.content)

    run(work)


def test_models_and_embeddings() -> None:
    async def work(client: Client) -> None:
        models = await client.get("/v1/models")
        assert check(SyncPage[Model], models.content, MODEL | {"SyncPage[Model].object"}).data
        check(Model, (await client.get("/v1/models/toy")).content, MODEL)
        answer = await client.post("/v1/embeddings", json={"model": "toy", "input": ["abc", "de"]})
        check(CreateEmbeddingResponse, answer.content)
        packed = await client.post("/v1/embeddings", json={"model": "toy", "input": "a", "encoding_format": "base64"})
        for entry in (content := packed.json())["data"]:  # the package has decoded these when its models come
            assert isinstance(entry["embedding"], str)
            entry["embedding"] = [1.0]
        check(CreateEmbeddingResponse, json.dumps(content))

    run(work)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400),
        ("/v1/chat/completions", {**CHAT, "nonsense": 1}, 400),
        ("/v1/chat/completions", {**CHAT, "model": "gpt-4"}, 404),
        ("/v1/completions", {"prompt": [1] * 96}, 400),
        ("/v1/responses", {"input": "hello", "store": True}, 400),
        ("/v1/embeddings", {"input": ""}, 400),
        ("/v1/nothing", {}, 404),
        ("/v1/messages", {**CHAT, "max_tokens": 0}, 400),
        ("/v1/messages", {**CHAT, "model": "claude"}, 404),
        ("/v1/messages/count_tokens", {"messages": []}, 400),
    ],
)
def test_errors(path: str, body: dict[str, Any], status: int) -> None:
    async def work(client: Client) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == status, answer.text
        check_error(answer.text, is_anthropic="messages" in path)

    run(work)


def test_missing_keys() -> None:
    async def work(client: Client) -> None:
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = await client.post(path, json=CHAT, headers={"Authorization": "Bearer wrong"})
            assert answer.status_code == 401
            check_error(answer.text, is_anthropic="messages" in path)

    run(work, api_keys=("secret",))


def check_error(data: str, *, is_anthropic: bool) -> None:
    """OpenAI's object, of which the package has a model for the inner part alone, or Anthropic's."""
    if is_anthropic:
        check(ErrorResponse, data)
        return
    content = json.loads(data)
    assert set(content) == {"error"}
    check(ErrorObject, json.dumps(content["error"]))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_errors_during_a_stream(path: str) -> None:
    """The engine fails after some tokens."""
    model = GatedModel()

    async def work(client: Client) -> None:
        prompt = {"input": "hello"} if "responses" in path else {"prompt": "hello"}
        fields = prompt if "messages" not in path and "chat" not in path else {"messages": MESSAGES}
        limit = "max_output_tokens" if "responses" in path else "max_tokens"
        body = {"model": "toy", limit: 40, "stream": True, "temperature": 0, **fields}
        model.allow(3)
        task = asyncio.ensure_future(client.post(path, json=body))
        while len(model.batch_sizes) < 3:
            await asyncio.sleep(0.001)
        model.fail = True
        model.allow(100)
        frames = data_of(await task)
        model.fail = False
        if "messages" in path:
            check_error(frames[-1], is_anthropic=True)
        elif "responses" in path:
            for frame in frames[-2:]:
                check(ResponseStreamEvent, frame, RESPONSE)
            assert [json.loads(frame)["type"] for frame in frames[-2:]] == ["error", "response.failed"]
        else:
            assert frames.pop() == "[DONE]"
            check_error(frames[-1], is_anthropic=False)

    run(work, model=model)
