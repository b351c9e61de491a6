"""Reasoning and tool calls as chats carry them, from the events of any parser."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_client

from fastinfer.server import chat_run
from fastinfer.server.output_plan import OutputPlan
from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

TEXT = ToyTokenizer().decode(greedy(ToyTokenizer().encode("hello,"), 30, stop_at_eos=False), skip_special_tokens=False)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class ByPlace:
    """The first 10 characters are reasoning, the next 5 text, and each further 10 the arguments of a call."""

    def __init__(self) -> None:
        self.place = 0

    def push(self, delta_text: str) -> list[Event]:
        events: list[Event] = []
        for letter in delta_text:
            number, place = divmod(self.place - 15, 10)
            if self.place < 10:
                events.append(ReasoningDelta(letter))
            elif self.place < 15:
                events.append(TextDelta(letter))
            else:
                if place == 0:
                    events.append(ToolCallStart(number, f"call{number}", "f"))
                events.append(ToolCallArguments(number, letter))
            self.place += 1
        return events

    def finish(self) -> list[Event]:
        return [ToolCallArguments(0, "!")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 30}, "length"),
        ({"stop": TEXT[-2:]}, "tool_calls"),
        ({"stop": TEXT[-2:], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "stop"),
        ({"stop": TEXT[-2:], "include_reasoning": False}, "tool_calls"),
        ({"stop": TEXT[-2:], "logprobs": True}, "tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_events(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], reason: str, stream: bool) -> None:
    monkeypatch.setattr(chat_run, "plan_output", lambda *args: OutputPlan(make_parser=ByPlace))
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": [TOOL], "temperature": 0, "ignore_eos": True, "stream": stream, **fields}
    body |= {"stream_options": {"include_usage": True}} if stream else {}

    async def main() -> str:
        async with toy_client() as client:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.text

    answer = asyncio.run(main())
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    if stream:
        chunks = [json.loads(block.removeprefix("data: ")) for block in answer.split("\n\n")[:-2]]
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content", "")
                message["reasoning_content"] += delta.get("reasoning_content", "")
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        assert call["function"] == {"name": "f", "arguments": ""}
                        message["tool_calls"].append(call)
                    else:
                        known = message["tool_calls"][call["index"]]["function"]
                        known["arguments"] += call["function"]["arguments"]
        assert chunks[-2]["choices"][0]["finish_reason"] == reason
        usage = chunks[-1]["usage"]
        for number, call in enumerate(message["tool_calls"]):
            assert call.pop("index") == number
    else:
        ChatCompletion.model_validate_json(answer, strict=True)
        choice = json.loads(answer)["choices"][0]
        assert choice["finish_reason"] == reason
        message, usage = {"reasoning_content": "", **choice["message"]}, json.loads(answer)["usage"]
    text = TEXT[: TEXT.index(fields["stop"])] if "stop" in fields else TEXT
    assert message["content"] == text[10:15]
    assert message["reasoning_content"] == ("" if fields.get("include_reasoning") is False else text[:10])
    arguments = [text[start : start + 10] for start in range(15, len(text), 10)]
    arguments[0] += "!"
    assert message["tool_calls"] == [
        {"id": f"call{number}", "type": "function", "function": {"name": "f", "arguments": argument}}
        for number, argument in enumerate(arguments)
    ]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


def test_tools_are_refused_as_long_as_nothing_reads_them() -> None:
    async def main() -> None:
        async with toy_client() as client:
            body = {"messages": [{"role": "user", "content": "hello"}], "tools": [TOOL], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
            assert (await client.post("/v1/chat/completions", json={**body, "tool_choice": "none"})).status_code == 200

    asyncio.run(main())
