"""Agents: the openai package with tools, from the call to the final answer, plain and with pydantic models."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.agent import ARGUMENTS, RESULT, SCHEMA, agent
from support.scripted import ScriptedModel, scripted_engine
from support.toy_server import toy_server

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
USER: Any = {"role": "user", "content": "Weather?"}
FINAL = f"The tool says: {RESULT}"


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str
    days: int


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return agent()


@pytest.fixture(scope="module")
def client(model: ScriptedModel) -> Iterator[openai.OpenAI]:
    with (
        toy_server(engine=lambda: scripted_engine(model)) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client


def results(calls: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]


def test_an_agent(client: openai.OpenAI, model: ScriptedModel) -> None:
    """The answer goes back as the package's object, with all the fields that it has."""
    messages = [USER]
    answer = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]  # type: ignore[union-attr]
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS  # type: ignore[union-attr]
    messages += [message, *results(message.tool_calls)]
    final = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS).choices[0]
    assert (final.message.content, final.finish_reason) == (FINAL, "stop")
    assert json.dumps(ARGUMENTS, ensure_ascii=False)[1:-1] in model.prompts[-1]


def test_an_agent_on_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="toy", messages=[USER], tools=TOOLS) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "now"]
    assert json.loads(done[0].arguments) == ARGUMENTS
    messages: Any = [USER, message, *results(message.tool_calls)]
    with client.chat.completions.stream(model="toy", messages=messages, tools=TOOLS) as stream:
        assert stream.get_final_completion().choices[0].message.content == FINAL


def test_pydantic_tools(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        answer = parse(model="toy", messages=[USER], tools=tools, parallel_tool_calls=False)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        [call] = message.tool_calls
        assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)  # type: ignore[arg-type]
        final = parse(model="toy", messages=[USER, message, *results([call])], tools=tools)
        assert final.choices[0].message.content == FINAL


class Place(pydantic.BaseModel):
    """Where."""

    name: str = pydantic.Field(max_length=9)
    kind: Literal["city", "country"]


class Journey(pydantic.BaseModel):
    """A journey."""

    places: list[Place] = pydantic.Field(min_length=1, max_length=2)
    title: str | None


def test_nested_pydantic_tools(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    answer = client.chat.completions.parse(
        model="toy",
        messages=[USER],
        tools=[openai.pydantic_function_tool(Journey)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=1000,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Journey)


def test_pydantic_tools_and_a_format_of_the_text(client: openai.OpenAI) -> None:
    """The model may either call a tool or answer in the format."""
    pytest.importorskip("llguidance")

    class Answer(pydantic.BaseModel):
        text: str

    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    answer = client.chat.completions.parse(
        model="toy", messages=[USER], tools=tools, response_format=Answer, max_tokens=300
    )
    message = answer.choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Answer)


def test_a_named_tool(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    choice: Any = {"type": "function", "function": {"name": "now"}}
    answer = client.chat.completions.create(model="toy", messages=[USER], tools=TOOLS, tool_choice=choice)
    assert answer.choices[0].finish_reason == "stop"
    [call] = answer.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("now", "{}")  # type: ignore[union-attr]


def test_bad_tools(client: openai.OpenAI) -> None:
    bad: Any = [*TOOLS, {"type": "function", "function": {"name": "not a name"}}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="toy", messages=[USER], tools=bad)
    assert error.value.param == "tools[2].function.name"
