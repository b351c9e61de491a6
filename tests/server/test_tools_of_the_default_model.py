"""Forced tool calls of the default model, whose template knows no tools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.chats import chat, streamed_chat
from support.toy_server import toy_client

from fastinfer import LLM

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
EMAIL = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.com$"},
        "urgent": {"type": "boolean"},
    },
    "required": ["to", "urgent"],
}
SCHEMAS = {"get_weather": WEATHER, "send_email": EMAIL}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
QUESTION = [{"role": "user", "content": "What will the weather be like in Paris in the next three days?"}]


@pytest.mark.slow
def test_arguments_are_valid(model_path: Path) -> None:
    choices: list[Any] = [{"type": "function", "function": {"name": name}} for name in SCHEMAS]

    async def main() -> None:
        llm = LLM(str(model_path))
        async with toy_client(engine=lambda: llm.engine) as client:
            for tool_choice in (*choices, "required"):
                for temperature in (0, 1):
                    ask = streamed_chat if temperature else chat
                    answer = await ask(
                        client,
                        messages=QUESTION,
                        tools=TOOLS,
                        tool_choice=tool_choice,
                        parallel_tool_calls=False,
                        temperature=temperature,
                        seed=1,
                        max_tokens=200,
                    )
                    [call] = answer["message"]["tool_calls"]
                    function = call["function"]
                    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
                    if tool_choice == "required":
                        assert answer["finish_reason"] == "tool_calls"
                    else:
                        assert function["name"] == tool_choice["function"]["name"]
                        assert answer["finish_reason"] == "stop"

    asyncio.run(main())
