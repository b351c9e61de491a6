"""Chats over HTTP whose raw answers are validated strictly against the models of the openai package."""

import json
from typing import Any

import httpx
from openai.types.chat import ChatCompletion, ChatCompletionChunk

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The choice of a whole answer, with its usage."""
    answer = await client.post(CHAT, json={"messages": USER, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content, strict=True)
    parsed = answer.json()
    [choice] = parsed["choices"]
    return {**choice, "usage": parsed["usage"]}


async def streamed_chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The same put together from a stream; every delta is checked."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(CHAT, json={"messages": USER, "temperature": 0, **options, **fields})
    assert answer.status_code == 200, answer.text
    blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block.startswith("data: ")]
    assert blocks.pop() == "[DONE]"
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    choice: dict[str, Any] = {"message": message, "finish_reason": None}
    for block in blocks:
        ChatCompletionChunk.model_validate_json(block, strict=True)
        chunk = json.loads(block)
        choice["usage"] = chunk["usage"]
        for part in chunk["choices"]:
            assert choice["finish_reason"] is None, "nothing follows a finish reason"
            choice["finish_reason"] = part["finish_reason"]
            _add(message, part["delta"])
    if not message.get("tool_calls"):
        message["content"] = message["content"] or ""
    return choice


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert set(call) == {"index", "id", "type", "function"}
            assert call["function"] == {"name": call["function"]["name"], "arguments": ""}
            calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
        else:
            assert call == {"index": len(calls) - 1, "function": {"arguments": call["function"]["arguments"]}}
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in an answer; their ids are unique."""
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
