"""Tool calls of the default model in the three interfaces, strictly: see tests/server/test_conformance.py."""

from typing import Any

import anthropic.types
import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from support.served import Served
from support.strict import check

QUESTION = "Tell me about France."
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["name", "is_capital"],
    "additionalProperties": False,
}
FUNCTION = {"name": "describe_city", "description": "Describe a city.", "parameters": SCHEMA, "strict": True}
CHOICE = {"Choice.stop_reason"}
RESPONSE = {"Response.store", "ResponseFunctionCallArgumentsDoneEvent.name"}  # OpenAI's server sends them


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {served.key}"}
    fields = {"model": served.model, "temperature": 0, **body}
    answer = httpx.post(f"{served.base}{path}", json=fields, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def data_of(served: Served, path: str, body: dict[str, Any]) -> list[str]:
    text = post(served, path, {**body, "stream": True}).text
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [block.rpartition("data: ")[2] for block in blocks]


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "describe_city"}}])
def test_chats(served: Served, choice: Any) -> None:
    body = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
    answer = check(ChatCompletion, post(served, "/chat/completions", body).content, CHOICE)
    assert choice == "auto" or answer.choices[0].message.tool_calls
    for data in data_of(served, "/chat/completions", body)[:-1]:
        check(ChatCompletionChunk, data, CHOICE)


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "name": "describe_city"}])
def test_responses(served: Served, choice: Any) -> None:
    body = {"input": QUESTION, "max_output_tokens": 60, "tools": [{"type": "function", **FUNCTION}]}
    body["tool_choice"] = choice
    answer = check(Response, post(served, "/responses", body).content, RESPONSE)
    assert choice == "auto" or answer.output[0].type == "function_call"
    for data in data_of(served, "/responses", body):
        check(ResponseStreamEvent, data, RESPONSE)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "describe_city"}])
def test_messages(served: Served, choice: Any) -> None:
    tool = {"name": "describe_city", "description": "Describe a city.", "input_schema": SCHEMA}
    body = {**CHAT, "tools": [tool], "tool_choice": choice}
    answer = check(anthropic.types.Message, post(served, "/messages", body).content)
    assert choice == {"type": "auto"} or answer.content[0].type == "tool_use"
    for data in data_of(served, "/messages", body):
        if data != '{"type":"ping"}':
            check(anthropic.types.RawMessageStreamEvent, data)
