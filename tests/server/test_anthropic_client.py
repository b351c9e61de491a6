"""The anthropic package against a server on a socket; raw answers are validated strictly against its models."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from pydantic import TypeAdapter
from support.fake_parser import ByPlace
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_server

from fastinfer.server import chat_run
from fastinfer.server.output_plan import OutputPlan

MESSAGES: Any = [{"role": "user", "content": "hello"}]
PROMPT = ToyTokenizer().encode("hello,")
PLAIN = {"model": "toy", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
EVENTS: Any = TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server(api_keys=("secret",), limits={"block_size": 4}) as (_, address):
        yield address


@pytest.fixture(scope="module", params=["x-api-key", "bearer"])
def client(url: str, request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    key = {"api_key": "secret"} if request.param == "x-api-key" else {"auth_token": "secret"}
    with anthropic.Anthropic(base_url=url, max_retries=0, timeout=30, **key) as client:  # type: ignore[arg-type]
        yield client


def post(url: str, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers={"X-Api-Key": "secret"}, timeout=30)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, whose names are those in the data."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] not in ("ping", "error"):
            EVENTS.validate_json(data.removeprefix("data: "), strict=True)
    return found


def test_an_answer(client: anthropic.Anthropic, url: str) -> None:
    expected = ToyTokenizer().decode(greedy(PROMPT, 3))
    answer = client.messages.create(model="toy", messages=MESSAGES, max_tokens=3, extra_body={"temperature": 0})
    assert answer.content[0].text == expected  # type: ignore[union-attr]
    assert answer.stop_reason == "max_tokens"
    raw = post(url, PLAIN)
    Message.model_validate_json(raw.content, strict=True)
    usage = raw.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(PROMPT)
    assert usage["output_tokens"] == 3


def test_a_stream(client: anthropic.Anthropic, url: str) -> None:
    with client.messages.stream(model="toy", messages=MESSAGES, max_tokens=3, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == ToyTokenizer().decode(greedy(PROMPT, 3))
        assert stream.get_final_message().usage.output_tokens == 3
    names = [event["type"] for event in events_of(post(url, {**PLAIN, "stream": True}))]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stop_sequences(url: str) -> None:
    text = ToyTokenizer().decode(greedy(PROMPT, 20))
    stop = text[4:6]
    answer = post(url, {**PLAIN, "max_tokens": 20, "stop_sequences": [stop]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]


def test_prompts(url: str) -> None:
    """System prompts, blocks and prefilled answers reach the template; a hash per request does not."""

    def tokens(**fields: Any) -> int:
        answer = post(url, {"model": "toy", "messages": MESSAGES, **fields}, "/v1/messages/count_tokens")
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["input_tokens"]
        return count

    assert tokens() == 6
    assert tokens(system="you") == 10
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=abc"}
    assert tokens(system=[billing, {"type": "text", "text": "you", "cache_control": {"type": "ephemeral"}}]) == 10
    assert tokens(system=[billing]) == 6
    assert tokens(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]) == 6
    assert tokens(messages=[*MESSAGES, {"role": "assistant", "content": "well"}]) == 10
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "and"}]},
    ]
    assert tokens(messages=conversation) == len("hello,,sunny,and,")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"nonsense": 1},
        {"temperature": 1.5},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        {"mcp_servers": []},
        {"container": "x"},
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}},
        {"stop_sequences": [""]},
        {"top_k": -3},
        {"system": [{"type": "image"}]},
        {"thinking": {"type": "sometimes"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_refused(url: str, fields: dict[str, Any]) -> None:
    answer = post(url, {**PLAIN, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert set(answer.json()["error"]) == {"type", "message"}


def test_errors_are_the_packages_exceptions(client: anthropic.Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", messages=MESSAGES, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
    ):
        stranger.messages.create(model="toy", messages=MESSAGES, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(chat_run, "plan_output", lambda *args: OutputPlan(make_parser=ByPlace))
    text = ToyTokenizer().decode(greedy(PROMPT, 20, stop_at_eos=False), skip_special_tokens=False)
    stop = text[12:14]
    with toy_server() as (_, address):
        body = {**PLAIN, "max_tokens": 20, "stop_sequences": [stop], "stream": stream}
        answer = post(address, body)
        if stream:
            events = events_of(answer)
            blocks: list[dict[str, Any]] = []
            for event in events:
                if event["type"] == "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append({**event["content_block"], "partial": ""})
                elif event["type"] == "content_block_delta":
                    delta = event["delta"]
                    [value] = [delta[name] for name in ("text", "thinking", "partial_json") if name in delta]
                    blocks[event["index"]]["partial"] += value
            for block in blocks:
                partial = block.pop("partial")
                field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
                block[field] = json.loads(partial) if field == "input" else partial
        else:
            Message.model_validate_json(answer.content, strict=True)
            blocks = answer.json()["content"]
    kept = text[: text.index(stop)]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (kept[:3], kept[3:6])
    assert (blocks[2]["id"], blocks[2]["name"]) == ("toolu_1", "f")
    assert len(blocks[2]["input"]["x"]) == len(kept) - 7
