"""The formats of tool calls end to end: what a model writes in each, and what the client gets."""

import asyncio
from typing import Any

import pytest
from support.chats import USER, calls_of, chat, streamed_chat
from support.scripted import ANSWER, ScriptedTokenizer, scripted_engine, scripted_model
from support.tool_formats import CALLS, FORMATS, TOOLS, ToolFormat, written
from support.toy_server import toy_client

from fastinfer.server.parsing import SPECS

PROMPT = "{% for m in messages if m.role != 'assistant' %}{{ m.role }}:{{ m.content }}{% endfor %}{{ tools | tojson }}"
# A control token that no format knows, in the midst of an answer.
STRANGE = "<|strange|>"


def tokenizer_of(form: ToolFormat, *, are_special: bool) -> ScriptedTokenizer:
    spec = SPECS[form.name]
    markers = spec.markers if are_special else ()
    template = f"{PROMPT}{form.template}{ANSWER}{{{{ {form.header!r} }}}}"
    return ScriptedTokenizer(template, control=[STRANGE, *markers])


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_calls(name: str, are_special: bool) -> None:
    """Several calls, streamed and whole, with markers that are control tokens and with others."""
    form = FORMATS[name]
    answer = written(name) + STRANGE
    model = scripted_model(tokenizer_of(form, are_special=are_special), answer, form.header)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            whole = await chat(client, tools=TOOLS)
            streamed = await streamed_chat(client, tools=TOOLS)
            for choice in (whole, streamed):
                assert calls_of(choice) == CALLS
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
            one = await streamed_chat(client, tools=TOOLS, parallel_tool_calls=False)
            assert calls_of(one) == CALLS[:1]
            # The conversation goes back with the answer in it.
            message = whole["message"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
            await chat(client, tools=TOOLS, messages=[*USER, message, *results])
            assert written(name).strip() in model.prompts[-1]

    asyncio.run(main())


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_in_any_format(name: str, are_special: bool) -> None:
    """Also where the model would rather say something else, and where its own format has no grammar."""
    pytest.importorskip("llguidance")
    form = FORMATS[name]
    model = scripted_model(tokenizer_of(form, are_special=are_special), "I would rather not.", form.header)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            named = {"type": "function", "function": {"name": "get_weather"}}
            for ask in (chat, streamed_chat):
                choice = await ask(client, tools=TOOLS, tool_choice=named)
                [(tool, arguments)] = calls_of(choice)
                assert tool == "get_weather"
                assert isinstance(arguments["city"], str)
                assert choice["finish_reason"] == "stop"
                choice = await ask(
                    client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=500
                )
                assert calls_of(choice)
                assert choice["finish_reason"] == "tool_calls"

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_stops_in_the_midst_of_a_call(name: str) -> None:
    """Wherever it does, the answer is well formed, and says what there is."""
    form = FORMATS[name]
    text = written(name)
    answers = iter([text[:end] for end in range(1, min(len(text), 200), 45)])
    model = scripted_model(tokenizer_of(form, are_special=False), lambda prompt: script[0], form.header)
    script = [""]

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for answer in answers:
                script[0] = answer
                whole = await chat(client, tools=TOOLS)
                streamed = await streamed_chat(client, tools=TOOLS)
                assert _without_ids(whole["message"]) == _without_ids(streamed["message"])
                has_calls = bool(whole["message"].get("tool_calls"))
                assert whole["finish_reason"] == ("tool_calls" if has_calls else "stop")
            cut = await chat(client, tools=TOOLS, max_tokens=5)
            assert cut["finish_reason"] == "length"

    asyncio.run(main())


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_that_is_cut_off_leaves_no_markup(name: str) -> None:
    """The name is complete or there is no call: the rest of the format is no text for the client."""
    pytest.importorskip("llguidance")
    form = FORMATS[name]
    model = scripted_model(tokenizer_of(form, are_special=False), "I would rather not.", form.header)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for ask in (chat, streamed_chat):
                for max_tokens in (1, 2, 3, 5, 9, 14, 20):
                    cut = await ask(client, tools=TOOLS, tool_choice="required", max_tokens=max_tokens)
                    assert cut["finish_reason"] == "length"
                    assert not cut["message"]["content"]

    asyncio.run(main())


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls", [])]}
