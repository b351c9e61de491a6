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
from support.agent import ARGUMENTS, RESULT, SCHEMA, agent
from support.scripted import scripted_engine
from support.toy import ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_server

from fastinfer.server.chat_run import ChatRun
from fastinfer.server.protocol.responses import ResponsesRequest

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
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"you,hello,well\n{call},The result of the call of f is:\nsunny\n\nPlease answer with this.,"
    assert tokens(items) == len(ToyTokenizer().encode(text))


def test_a_request_becomes_a_chat() -> None:
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "sunny", "name": "f"},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"role": "user", "content": "and"},
    ]
    schema = {"type": "object"}
    fields = {
        "instructions": "be",
        "tools": [{"type": "function", "name": "f", "description": "it", "parameters": schema, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "top_p": 0.25,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }
    chat = ResponsesRequest.model_validate({**PLAIN, "input": items, **fields}).as_chat()
    calls = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
        for key, name, arguments in (("a", "f", {}), ("b", "g", {"x": 1}))
    ]
    assert [message.for_template() for message in chat.messages] == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "well", "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "a", "name": "f"},
        {"role": "user", "content": "and"},
    ]
    assert [tool.function.model_dump() for tool in chat.tools or ()] == [
        {"name": "f", "description": "it", "parameters": schema, "strict": True}
    ]
    assert chat.tool_choice is not None
    assert chat.tool_choice.function.name == "f"
    assert (chat.parallel_tool_calls, chat.reasoning_effort) == (False, "low")
    assert (chat.temperature, chat.top_p, chat.max_tokens) == (0, 0.25, 3)
    assert chat.response_format is not None
    assert chat.response_format.json_schema.schema_ == schema


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


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def part(**fields: Any) -> dict[str, Any]:
    return item(role="user", content=[{"type": "input_text", "text": "a", **fields}])


def form(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": fields}}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
NUMBERS = {"type": "array", "items": {"type": "integer"}}  # the toy has no brackets: no text can match


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (item(role="user"), "input[0].content"),
        (item(content="a"), "input[0].role"),
        (item(type="item_reference", id="x"), "input[0].type"),
        (item(type="function_call", call_id="a"), "input[0].name"),
        (item(type="function_call", name="f"), "input[0].call_id"),
        (item(type="function_call", name="f", call_id="a", arguments="{"), "input[0].arguments"),
        (item(type="function_call_output", output="a"), "input[0].call_id"),
        (item(type="function_call_output", call_id="a"), "input[0].output"),
        (item(role="user", content="a", summary=[]), "input[0].summary"),
        (item(**REASONING, encrypted_content="x"), "input[0].encrypted_content"),
        (item(**REASONING, content=[{"type": "text", "text": "x"}]), "input[0].content[0].type"),
        (part(image_url="x"), "input[0].content[0].image_url"),
        (item(role="assistant", content=[{"type": "input_image", "image_url": "x"}]), "input[0]"),
        (part(type="input_image"), "input[0].content[0].image_url"),
        (form(type="text", schema={}), "text.format.schema"),
        (form(type="json_schema", name="x"), "text.format.schema"),
        (form(type="json_schema", schema={}), "text.format.name"),
        (form(type="json_schema", name="x", schema=NUMBERS), "text.format.schema"),
        (form(type="xml"), "text.format.type"),
        ({"max_output_tokens": 2**40}, "max_output_tokens"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "a" * 20_000}, "input"),
    ],
)  # fmt: skip
def test_errors_have_the_clients_own_names(url: str, fields: dict[str, Any], param: str) -> None:
    pytest.importorskip("llguidance")
    answer = post(url, {**PLAIN, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "back",
    [
        {**REASONING, "encrypted_content": None, "status": None, "content": [{"type": "reasoning_text", "text": "so"}]},
        {**REASONING, "encrypted_content": None, "content": None},
        {**REASONING, "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": None}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "", "status": "completed",
         "caller": None, "namespace": None},
        # What the openai package's responses.parse() returns, dumped.
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": '{"x":1}', "annotations": [], "parsed": {"x": 1}}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{"x":1}',
         "parsed_arguments": {"x": 1}},
        {"type": "function_call_output", "call_id": "a", "output": "b", "id": None, "status": None},
    ],
)  # fmt: skip
def test_what_clients_send_back_is_taken(url: str, back: dict[str, Any]) -> None:
    items = [{"role": "user", "content": "a"}, back, {"role": "user", "content": "b"}]
    answer = post(url, {"model": "toy", "input": items}, "/v1/responses/input_tokens")
    assert answer.status_code == 200, answer.text


def test_nothing_is_kept(url: str) -> None:
    assert httpx.get(f"{url}/v1/responses/resp_1").status_code == 404
    assert post(url, {}, "/v1/responses/resp_1/cancel").status_code == 404


TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ASK = {"model": "toy", "input": "Weather?", "tools": TOOLS}
NAMED = {"type": "function", "name": "f"}


@pytest.fixture(scope="module")
def agent_url() -> Iterator[str]:
    model = agent()
    with toy_server(engine=lambda: scripted_engine(model)) as (_, address):
        yield address


def response_of(answer: httpx.Response, stream: bool) -> dict[str, Any]:
    """The response, whose items are those of the events if it is streamed."""
    if not stream:
        assert answer.status_code == 200, answer.text
        Response.model_validate_json(answer.content, strict=True)
        whole: dict[str, Any] = answer.json()
        return whole
    events = events_of(answer)
    response: dict[str, Any] = events[-1]["response"]
    for index, item in enumerate(response["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert (mine[-1]["type"], mine[-1]["item"]) == ("response.output_item.done", item)
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    return response


def test_reasoning_has_no_more_tokens_than_the_answer(agent_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text may have more tokens than those that the model has written."""

    async def many(self: ChatRun, text: str) -> int:
        return 1000 if text else 0

    monkeypatch.setattr(ChatRun, "num_tokens", many)
    usage = post(agent_url, ASK).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": usage["output_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
def test_tools(agent_url: str, stream: bool) -> None:
    pytest.importorskip("llguidance")

    def ask(**fields: Any) -> dict[str, Any]:
        return response_of(post(agent_url, {**ASK, "stream": stream, **fields}), stream)

    response = ask()
    reasoning, message, call, other = response["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "I need a tool.")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "get_weather", ARGUMENTS)
    assert (other["name"], other["arguments"]) == ("now", "{}")
    assert call["call_id"] != other["call_id"]
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("I need a tool.")}
    kinds = [item["type"] for item in ask(parallel_tool_calls=False)["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    reasoning, call = ask(tool_choice="required", parallel_tool_calls=False)["output"]
    assert (reasoning["type"], call["type"]) == ("reasoning", "function_call")
    reasoning, call = ask(tool_choice={"type": "function", "name": "now"})["output"]
    assert (call["name"], call["arguments"]) == ("now", "{}")
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    response = ask(tool_choice=choice, parallel_tool_calls=False)
    reasoning, call = response["output"]
    assert (call["name"], response["tool_choice"]) == ("now", choice)
    kinds = [item["type"] for item in ask(tool_choice="none")["output"]]
    assert kinds == ["reasoning", "message"]
    cut = ask(max_output_tokens=10)
    assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")


def test_only_the_last_item_is_cut_off() -> None:
    """Also where a stream comes from the cache, and so all items at once."""
    model = agent()
    with toy_server(engine=lambda: scripted_engine(model), response_cache="memory") as (_, address):
        for cached in ("miss", "hit"):
            answer = post(address, {**ASK, "stream": True, "temperature": 0, "max_output_tokens": 60})
            assert answer.headers["x-cache"] == cached
            items = response_of(answer, True)["output"]
            assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + ["incomplete"]
            assert len(items) > 1


def test_an_agent(agent_url: str) -> None:
    """The package's objects go back as they came."""
    with openai.OpenAI(base_url=f"{agent_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        items: Any = [{"role": "user", "content": "Weather?"}]
        with client.responses.stream(model="toy", input=items, tools=TOOLS) as stream:
            response = stream.get_final_response()
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["get_weather", "now"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]
        final = client.responses.create(model="toy", input=items, tools=TOOLS)
        assert final.output_text == f"The tool says: {RESULT}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, {"type": "function", "name": "a b"}]}, "tools[2].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
        ({"tools": [{**TOOLS[0], "parameters": {"not": {}}}]}, "tools[0].parameters"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(agent_url: str, fields: dict[str, Any], param: str) -> None:
    pytest.importorskip("llguidance")
    answer = post(agent_url, {**ASK, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


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
