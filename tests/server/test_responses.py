"""The responses interface with the openai package; raw answers are validated strictly against its models."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.fake_parser import ByPlace
from support.toy import ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_server

from fastinfer.server import chat_run
from fastinfer.server.output_plan import OutputPlan

PROMPT = ToyTokenizer().encode("hello,")
PLAIN = {"model": "toy", "input": "hello", "max_output_tokens": 3, "temperature": 0}
EVENTS: Any = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server() as (_, address):
        yield address


def post(url: str, body: dict[str, Any], path: str = "/v1/responses") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, which are numbered and named as the data says."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response(url: str) -> None:
    expected = ToyTokenizer().decode(greedy(PROMPT, 3))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="toy", input="hello", max_output_tokens=3, temperature=0)
        assert answer.output_text == expected
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
        with client.responses.stream(model="toy", input="hello", max_output_tokens=3, temperature=0) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == expected
    raw = post(url, PLAIN)
    Response.model_validate_json(raw.content, strict=True)
    assert raw.json()["usage"]["input_tokens"] == len(PROMPT)
    assert raw.json()["usage"]["output_tokens"] == 3


def test_a_stream(url: str) -> None:
    events = events_of(post(url, {**PLAIN, "stream": True}))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == events[-4]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_prompts(url: str) -> None:
    def tokens(items: Any, **fields: Any) -> int:
        answer = post(url, {"model": "toy", "input": items, **fields}, "/v1/responses/input_tokens")
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["input_tokens"]
        return count

    assert tokens("hello") == 6
    assert tokens("hello", instructions="you") == 10
    assert tokens([{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]) == 6
    items = [
        {"role": "developer", "content": "you"},
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "well", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
    ]
    assert tokens(items) == len("you,hello,well,sunny,")


@pytest.mark.parametrize(
    "fields",
    [
        {"nonsense": 1},
        {"previous_response_id": "resp_1"},
        {"conversation": "x"},
        {"store": True},
        {"background": True},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "name": "a b"}]},
        {"truncation": "auto"},
        {"max_output_tokens": 0},
        {"temperature": 200},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"include": ["message.output_text.logprobs"]},
        {"top_logprobs": 2},
        {"reasoning": {"effort": "extreme"}},
        {"prompt": {"id": "x"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_refused(url: str, fields: dict[str, Any]) -> None:
    answer = post(url, {**PLAIN, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_nothing_is_kept(url: str) -> None:
    assert httpx.get(f"{url}/v1/responses/resp_1").status_code == 404
    assert post(url, {}, "/v1/responses/resp_1/cancel").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls(monkeypatch: pytest.MonkeyPatch, stream: bool, url: str) -> None:
    monkeypatch.setattr(chat_run, "plan_output", lambda *args: OutputPlan(make_parser=ByPlace))
    body = {**PLAIN, "max_output_tokens": 20, "stream": stream}
    answer = post(url, body)
    if stream:
        events = events_of(answer)
        response = events[-1]["response"]
        for index, item in enumerate(response["output"]):
            mine = [event for event in events if event.get("output_index") == index]
            assert mine[0]["type"] == "response.output_item.added"
            assert mine[-1] == {**mine[-1], "type": "response.output_item.done", "item": {**item, **_status(mine[-1])}}
            text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
            assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    else:
        Response.model_validate_json(answer.content, strict=True)
        response = answer.json()
    text = ToyTokenizer().decode(greedy(PROMPT, 20), skip_special_tokens=False)
    reasoning, message, call = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", text[:3])
    assert (message["type"], message["content"][0]["text"]) == ("message", text[3:6])
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "toolu_1", "f")
    assert set(json.loads(call["arguments"])) == {"x"}
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] <= 3


def _status(event: dict[str, Any]) -> dict[str, Any]:
    return {"status": event["item"]["status"]}


def test_a_failure_during_a_stream(url: str) -> None:
    """Its last events say so, also where the answer has begun already."""
    model = GatedModel()
    with toy_server(model) as (_, address):
        answers = []

        def ask() -> None:
            headers = {"X-Request-Timeout": "0.2"}
            body = {**PLAIN, "max_output_tokens": 80, "stream": True}
            answers.append(httpx.post(f"{address}/v1/responses", json=body, headers=headers, timeout=30))

        thread = threading.Thread(target=ask)
        thread.start()
        model.allow(3)
        threading.Event().wait(0.4)  # the deadline passes during a step
        model.allow(1000)
        thread.join(20)
    events = events_of(answers[0])
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"
