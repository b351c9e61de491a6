"""The anthropic package against a server on a socket; raw answers are validated strictly against its models."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from pydantic import BaseModel, TypeAdapter
from support.agent import ARGUMENTS, RESULT, SCHEMA, agent
from support.scripted import scripted_engine
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_server

from fastinfer.server.protocol.messages import MessagesRequest

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
    for text in ("x-anthropic-billing-header: cch=abc\nyou", "you"):
        assert tokens(system=text) == tokens(system=[{"type": "text", "text": text}]) == 10
    assert tokens(system="x-anthropic-billing-headers") > 10
    assert tokens(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]) == 6
    assert tokens(messages=[*MESSAGES, {"role": "assistant", "content": "well"}]) == 10
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "and"}]},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    text = f"hello,{call},The result of the call of f is:\nsunny\n\nPlease answer with this.,and,"
    assert tokens(messages=conversation) == len(ToyTokenizer().encode(text))


def test_a_request_becomes_a_chat() -> None:
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, called]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, result]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
    ]
    tools = [{"name": "f", "description": "it", "input_schema": {"type": "object"}, "strict": True}]
    fields = {
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "xhigh", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "stop_sequences": ["x"],
        "stream": True,
    }
    chat = MessagesRequest.model_validate({**PLAIN, "messages": conversation, "system": "be", **fields}).as_chat()
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert [message.for_template() for message in chat.messages] == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "user", "content": "and"},
    ]
    assert chat.continue_final_message is None
    assert [tool.function.model_dump() for tool in chat.tools or ()] == [
        {"name": "f", "description": "it", "parameters": {"type": "object"}, "strict": True}
    ]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "xhigh"}
    assert chat.structured_outputs is not None
    assert chat.structured_outputs.json_ == {"type": "object"}
    assert (chat.temperature, chat.top_p, chat.top_k, chat.max_tokens, chat.stop) == (0.5, 0.25, 3, 3, ["x"])
    assert chat.stream_options is not None
    assert chat.stream_options.include_usage
    begun = MessagesRequest.model_validate(
        {**PLAIN, "messages": [*MESSAGES, {"role": "assistant", "content": "well"}], "thinking": {"type": "adaptive"}}
    ).as_chat()
    assert begun.continue_final_message
    assert begun.chat_template_kwargs == {"enable_thinking": True}
    assert begun.stream_options is None


def test_a_result_that_is_an_error_says_so(url: str) -> None:
    def tokens(**fields: Any) -> int:
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x", **fields}]}
        body = {"model": "toy", "messages": [*MESSAGES, called, result]}
        count: int = post(url, body, "/v1/messages/count_tokens").json()["input_tokens"]
        return count

    more = len(ToyTokenizer().encode("Error: "))
    assert tokens() == tokens(is_error=False) == tokens(is_error=None) == tokens(is_error=True) - more


def block(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [fields]}]}


USE = {"role": "assistant", "type": "tool_use", "id": "a", "name": "f", "input": {}}
PLACE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (block(type="text", text="a", thinking="b"), PLACE + ".thinking"),
        (block(type="text", text="a", id="b"), PLACE + ".id"),
        (block(type="text"), PLACE + ".text is missing"),
        (block(type="image", source={}), PLACE + ".source.type is missing"),
        (block(type="image", source={"type": "url"}), PLACE + ".source.type must be one of base64, got 'url'"),
        (block(type="video"), PLACE + ".type must be one of text, image, tool_result, got 'video'"),
        (block(type="tool_result", content="x"), PLACE + ".tool_use_id"),
        (block(type="tool_result", tool_use_id="a", content=[{"type": "image"}]), PLACE + ".content[0].source"),
        (block(type="tool_result", tool_use_id="a", content=[{"type": "document"}]), PLACE + ".content[0].type"),
        *((block(**USE | {name: None}), f"{PLACE}.{name}") for name in ("id", "name", "input")),
        (block(**USE, text="a"), PLACE + ".text"),
        (block(**USE, caller={"type": "code_execution_20250825"}), PLACE + ".caller.type"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget is not a field of this request"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages"),
    ],
)  # fmt: skip
def test_errors_name_the_field(url: str, fields: dict[str, Any], place: str) -> None:
    answer = post(url, {**PLAIN, **fields})
    assert answer.status_code == 400, answer.text
    assert place in answer.json()["error"]["message"]


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


TOOLS: Any = [
    {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object"}},
]
ANY = {"type": "any"}
ASK: Any = [{"role": "user", "content": "Weather?"}]
WHOLE = {"model": "toy", "messages": ASK, "max_tokens": 500}


@pytest.fixture(scope="module")
def agent_url() -> Iterator[str]:
    model = agent()
    with toy_server(api_keys=("secret",), engine=lambda: scripted_engine(model)) as (_, address):
        yield address


def blocks_of(answer: httpx.Response, stream: bool) -> tuple[list[dict[str, Any]], str]:
    """The blocks of an answer, and why it has ended."""
    assert answer.status_code == 200, answer.text
    if not stream:
        Message.model_validate_json(answer.content, strict=True)
        return answer.json()["content"], answer.json()["stop_reason"]
    blocks: list[dict[str, Any]] = []
    partial, reason = "", ""
    for event in events_of(answer):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                partial = ""
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                [value] = [event["delta"][n] for n in ("text", "thinking", "partial_json") if n in event["delta"]]
                partial += value
            case "content_block_stop":
                field = {"text": "text", "thinking": "thinking", "tool_use": "input"}[blocks[-1]["type"]]
                blocks[-1][field] = json.loads(partial) if field == "input" else partial
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    return blocks, reason


@pytest.mark.parametrize("stream", [False, True])
def test_tools(agent_url: str, stream: bool) -> None:
    pytest.importorskip("llguidance")

    def ask(**fields: Any) -> tuple[list[dict[str, Any]], str]:
        return blocks_of(post(agent_url, {**WHOLE, "stream": stream, "tools": TOOLS, **fields}), stream)

    blocks, reason = ask()
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("I need a tool.", "Let me see.")
    assert (blocks[2]["name"], blocks[2]["input"], blocks[3]["name"]) == ("get_weather", ARGUMENTS, "now")
    assert reason == "tool_use"
    blocks, reason = ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    blocks, reason = ask(tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert ([block["type"] for block in blocks], reason) == (["thinking", "tool_use"], "tool_use")
    blocks, reason = ask(tool_choice={"type": "tool", "name": "now"}, max_tokens=1000)
    assert ([block["name"] for block in blocks[1:]], reason) == (["now"], "tool_use")
    blocks, reason = ask(tool_choice={"type": "none"})
    assert ([block["type"] for block in blocks], reason) == (["thinking", "text"], "end_turn")
    blocks, reason = ask(max_tokens=42)
    assert (blocks[-1]["type"], reason) == ("text", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(agent_url: str, stream: bool) -> None:
    def ask(**thinking: Any) -> list[dict[str, Any]]:
        return blocks_of(post(agent_url, {**WHOLE, "stream": stream, "thinking": thinking}), stream)[0]

    assert ask(type="enabled", budget_tokens=100)[0]["thinking"] == "I need a tool."
    assert ask(type="enabled", budget_tokens=16)[0]["thinking"] == "I need a"
    assert ask(type="adaptive", display="omitted")[0]["type"] == "text"


class Weather(BaseModel):
    city: str
    days: int


def test_structured_outputs(agent_url: str) -> None:
    """The schema that the package makes of a class is obeyed, at once and in a stream."""
    pytest.importorskip("llguidance")
    with anthropic.Anthropic(base_url=agent_url, api_key="secret", max_retries=0, timeout=30) as client:
        fields: Any = {"model": "toy", "max_tokens": 500, "messages": ASK, "output_format": Weather}
        fields["extra_body"] = {"temperature": 0}
        answer = client.messages.parse(**fields, output_config={"effort": "low"})
        assert isinstance(answer.parsed_output, Weather)
        with client.messages.stream(**fields) as stream:
            assert stream.get_final_message().parsed_output == answer.parsed_output
        assert client.messages.count_tokens(model="toy", messages=ASK, output_format=Weather).input_tokens > 0


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "output_config.format.schema cannot be enforced"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, "tool_choice and a format"),
    ],
)
def test_bad_schemas_of_the_output_are_refused_by_name(agent_url: str, fields: dict[str, Any], place: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object" if fields else "nonsense"}
    form = {"type": "json_schema", "schema": schema}
    answer = post(agent_url, {**WHOLE, **fields, "output_config": {"format": form}})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(place)


def test_an_agent(agent_url: str) -> None:
    """The package's objects go back as they came."""
    with anthropic.Anthropic(base_url=agent_url, api_key="secret", max_retries=0, timeout=30) as client:
        messages = list(ASK)
        with client.messages.stream(model="toy", max_tokens=500, messages=messages, tools=TOOLS) as stream:
            message = stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("get_weather", ARGUMENTS), ("now", {})]
        results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        final = client.messages.create(model="toy", max_tokens=500, messages=messages, tools=TOOLS)
        assert final.stop_reason == "end_turn"
        assert final.content[-1].text == f"The tool says: {RESULT}"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [*TOOLS, {"name": "a b", "input_schema": {}}]}, "tools[2].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "x"}}], "tool_choice": ANY}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "f", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(agent_url: str, fields: dict[str, Any], place: str) -> None:
    pytest.importorskip("llguidance")
    answer = post(agent_url, {**WHOLE, **fields})
    assert answer.status_code == 400, answer.text
    assert place in answer.json()["error"]["message"]
