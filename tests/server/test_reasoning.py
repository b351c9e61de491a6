"""Reasoning in chats: where it begins and ends, its tokens, its limit, and what may follow it."""

import asyncio
from typing import Any

import pytest
from support.chats import CHAT, USER, calls_of, chat, streamed_chat
from support.scripted import ANSWER, ScriptedModel, ScriptedTokenizer, scripted_engine, scripted_model
from support.tool_formats import TOOLS
from support.toy_server import toy_client

from fastinfer.server.output_format import find_format

MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{{ tools | tojson if tools }}{# <tool_call> #}"
)
HEADER = "<|im_start|>assistant\n"
# As Qwen3 writes it: the model opens its reasoning by itself, or finds an empty one.
NO_THINKING = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
QWEN = MESSAGES + ANSWER + HEADER + NO_THINKING
# As DeepSeek R1 and QwQ: the prompt opens it.
OPEN = f"{MESSAGES}{ANSWER}{HEADER}{{{{ '<think>\\n' }}}}"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def opened(answer: Any, **options: Any) -> ScriptedModel:
    return scripted_model(ScriptedTokenizer(OPEN, **options), answer, f"{HEADER}<think>\n")


def qwen(answer: Any, header: str = HEADER, **options: Any) -> ScriptedModel:
    return scripted_model(ScriptedTokenizer(QWEN, **options), answer, header)


MARKS: list[dict[str, Any]] = [{}, {"control": ["<think>", "</think>"]}, {"literal": ["<think>", "</think>"]}]


@pytest.mark.parametrize("ask", [chat, streamed_chat])
@pytest.mark.parametrize("options", MARKS, ids=["text", "control", "literal"])
@pytest.mark.parametrize(
    "make", [lambda **o: opened("So.\n</think>\n\nYes.", **o), lambda **o: qwen("<think>\nSo.\n</think>\n\nYes.", **o)]
)
def test_reasoning_and_text(make: Any, options: dict[str, Any], ask: Any) -> None:
    model = make(**options)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            choice = await ask(client)
            message = choice["message"]
            assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")
            assert choice["finish_reason"] == "stop"
            assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
            hidden = await ask(client, include_reasoning=False)
            assert "reasoning_content" not in hidden["message"]
            assert hidden["message"]["content"] == "Yes."
            assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
            cut = await ask(client, max_tokens=10 if model.tokenizer.encode("<think>")[0] < 256 else 4)
            assert cut["finish_reason"] == "length"
            assert cut["message"]["content"] == ""

    asyncio.run(main())


def test_effort() -> None:
    """It reaches the template; with "none" the prompt has an empty reasoning, and the answer none."""
    model = qwen("Yes.", f"{HEADER}<think>\n\n</think>\n\n")

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
                choice = await chat(client, **fields)
                assert choice["message"]["content"] == "Yes."
                assert "reasoning_content" not in choice["message"]

    asyncio.run(main())


def test_reasoning_comes_back_under_either_name() -> None:
    model = opened("</think>Yes.")

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for name in ("reasoning", "reasoning_content"):
                answer = {"role": "assistant", "content": "Well.", name: "Hm."}
                await chat(client, messages=[*USER, answer, *USER])
                assert "<think>Hm.</think>Well." in model.prompts[-1]

    asyncio.run(main())


@pytest.mark.parametrize("ask", [chat, streamed_chat])
@pytest.mark.parametrize("options", MARKS, ids=["text", "control", "literal"])
def test_calls_after_reasoning(options: dict[str, Any], ask: Any) -> None:
    pytest.importorskip("llguidance")
    model = opened(f"A tool?\n</think>\n\n{CALL}", **options)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for choice in ("auto", "required", {"type": "function", "function": {"name": "now"}}):
                answer = await ask(client, tools=TOOLS, tool_choice=choice)
                assert answer["message"]["reasoning_content"] == "A tool?"
                assert answer["message"]["content"] is None
                assert calls_of(answer) == [("now", {})]

    asyncio.run(main())


@pytest.mark.parametrize("options", MARKS, ids=["text", "control", "literal"])
def test_a_model_may_reason_before_what_is_forced(options: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    script = [""]
    model = qwen(lambda _: script[0], **options)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            for begin in ("", "<think>\nA tool?\n</think>\n\n"):
                script[0] = begin + CALL
                answer = await chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
                assert calls_of(answer) == [("now", {})]
                assert answer["message"].get("reasoning_content", "") == ("A tool?" if begin else "")
                script[0] = begin + '"no"'
                answer = await chat(client, structured_outputs={"json": {"enum": ["yes", "no"]}})
                assert answer["message"]["content"] == '"no"'
                assert answer["message"].get("reasoning_content", "") == ("A tool?" if begin else "")

    asyncio.run(main())


@pytest.mark.parametrize("options", MARKS, ids=["text", "control", "literal"])
def test_a_format_of_the_text_begins_behind_open_reasoning(options: dict[str, Any]) -> None:
    """It must not constrain the reasoning, nor be taken for it."""
    pytest.importorskip("llguidance")
    model = opened("So.\n</think>\n\nmaybe", **options)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            answer = await chat(client, structured_outputs={"choice": ["maybe", "no"]})
            assert answer["message"]["reasoning_content"] == "So."
            assert answer["message"]["content"] == "maybe"
            refused = await client.post(CHAT, json={"messages": USER, "structured_outputs": {"grammar": 'start: "a"'}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")

    asyncio.run(main())


@pytest.mark.parametrize("ask", [chat, streamed_chat])
@pytest.mark.parametrize("options", MARKS, ids=["text", "control", "literal"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_ends_the_reasoning(is_open: bool, options: dict[str, Any], ask: Any) -> None:
    begin = "" if is_open else "<think>"
    pytest.importorskip("llguidance")
    long = f"{begin}{'x' * 60}</think>Yes."
    model = opened(long, **options) if is_open else qwen(long, **options)
    num_begin = len(model.tokenizer.encode(begin))

    async def main() -> None:
        # With the cache, which must not try to make a key of the budget.
        async with toy_client(engine=lambda: scripted_engine(model), response_cache="memory") as client:
            choice = await ask(client, thinking_token_budget=10 + num_begin, max_tokens=40)
            assert choice["message"]["reasoning_content"] == "x" * 10
            # The script goes on as if nothing had happened.
            assert choice["message"]["content"].startswith("xxx")
            named = {"type": "function", "function": {"name": "now"}}
            called = await ask(client, thinking_token_budget=10 + num_begin, tools=TOOLS, tool_choice=named)
            assert called["message"]["reasoning_content"] == "x" * 10
            assert calls_of(called) == [("now", {})]
            free = await ask(client, thinking_token_budget=100)
            assert free["message"]["reasoning_content"] == "x" * 60
            assert free["message"]["content"] == "Yes."

    asyncio.run(main())


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{# <|channel|>analysis #}" + ANSWER
    model = scripted_model(ScriptedTokenizer(template), "<|channel|>analysis<|message|>So.<|end|>")

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            answer = await client.post(CHAT, json={"messages": USER, "thinking_token_budget": 5})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget")
            assert (await chat(client))["message"]["reasoning_content"] == "So."

    asyncio.run(main())


def test_the_servers_options() -> None:
    async def ask(answer: str, template: str, parser: str) -> dict[str, Any]:
        model = scripted_model(ScriptedTokenizer(template), answer)
        async with toy_client(engine=lambda: scripted_engine(model), reasoning_parser=parser) as client:
            message: dict[str, Any] = (await chat(client))["message"]
            return message

    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + ANSWER
    assert asyncio.run(ask("So.</think>Yes.", template, "deepseek_r1"))["reasoning_content"] == "So."
    assert asyncio.run(ask("[THINK]So.[/THINK]Yes.", template, "mistral"))["content"] == "Yes."
    assert asyncio.run(ask("<think>So.</think>Yes.", template, "auto"))["content"] == "<think>So.</think>Yes."
    assert asyncio.run(ask("<think>So.</think>Yes.", template + "{# <think> #}", "none"))["content"].startswith(
        "<think>"
    )


@pytest.mark.parametrize(
    ("template", "is_generic", "has_calls"),
    [
        ("{{ messages[0].content }}", True, True),
        ("{{ messages[0].content }} Write your calls between <tools> tags", True, True),
        (
            "{{ messages[0].content }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}<tool_call>",
            False,
            True,
        ),
        ("{{ messages[0].content }}{{ tools }}", False, False),
        ("{{ messages[0].content }}{{ tools }}<tool_call><arg_key>", False, False),
        ("{{ raise_exception('no') }}{{ tools }}<tool_call>", False, True),
    ],
)
def test_what_a_template_knows_of_tools(template: str, is_generic: bool, has_calls: bool) -> None:
    tokenizer: Any = ScriptedTokenizer(template)
    form = find_format(tokenizer)
    assert form.is_generic is is_generic
    assert (form.spec is not None and form.spec.has_calls) is has_calls
    assert not find_format(tokenizer, "mistral").is_generic
    assert not find_format(tokenizer, "none").has_tools


def test_a_response_template_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """One that is malformed does not stop the server."""
    fields = {"thinking": {"open": "<r>", "close": "</r>"}, "content": {}}
    good = {"start_anchor": HEADER, "fields": fields}
    tokenizer: Any = ScriptedTokenizer(QWEN, response_template=good)
    form = find_format(tokenizer)
    assert form.spec is not None
    assert form.spec.markers == ("<r>", "</r>")
    tokenizer.response_template = {"fields": 5}
    form = find_format(tokenizer)
    assert form.spec is not None
    assert "<think>" in form.spec.markers
    assert "response_template" in caplog.text
    tokenizer.response_template = good
    form = find_format(tokenizer, "qwen3_coder")
    assert form.spec is not None
    assert form.spec.has_calls


def test_a_constrained_text_needs_no_markers_of_the_response_template() -> None:
    pytest.importorskip("llguidance")
    template = {"start_anchor": HEADER, "fields": {"content": {"open": "<r>", "close": "</r>"}}}
    model = qwen("no", response_template=template)

    async def main() -> None:
        async with toy_client(engine=lambda: scripted_engine(model)) as client:
            assert (await chat(client))["message"]["content"] == ""
            answer = await chat(client, structured_outputs={"choice": ["maybe", "no"]})
            assert answer["message"]["content"] == "no"

    asyncio.run(main())
