"""Every field is honoured or refused by its name."""

import asyncio
from typing import Any

import pytest
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_client

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = ToyTokenizer().encode("hello,")


def post(path: str, body: dict[str, Any], **settings: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one request to a server of its own."""

    async def main() -> tuple[int, dict[str, Any]]:
        async with toy_client(**settings) as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()

    return asyncio.run(main())


# Field and value; the error is about the field unless a third item names another one.
REFUSED_BY_CHATS: list[tuple[Any, ...]] = [
    ("nonsense", 1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", -0.1),
    ("top_p", 0),
    ("n", 0),
    ("n", 129),
    ("n", 10**9),
    ("n", 2.5),
    ("seed", -1),
    ("stop", [""]),
    ("stop", 7),
    ("stop", ["x"] * 33),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"64": 1}),
    ("logit_bias", {"-1": 1}),
    ("max_tokens", 0),
    ("max_completion_tokens", -1, "max_tokens"),
    ("top_logprobs", 3),
    ("top_logprobs", 21, "logprobs", {"logprobs": True}),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("stop_token_ids", [64]),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("truncate_prompt_tokens", 0),
    ("prompt_logprobs", 21),
    ("structured_outputs", {}, None),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, None),
    ("structured_outputs", {"nonsense": 1}, "structured_outputs.nonsense"),
    ("request_id", "a\nb"),
    ("request_id", "x" * 129),
    ("cache_salt", "x" * 129),
    ("stream_interval", 0),
    ("use_beam_search", True),
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "a"),
    ("logprob_token_ids", [1]),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "king", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": "x", "size": 1}], "messages[0].size"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "assistant", "function_call": {"name": "x"}}], "messages[0].function_call"),
    ("tools", []),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("reasoning_effort", "extreme"),
    ("modalities", ["audio"], "modalities[0]"),
    ("audio", {"voice": "x"}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("prediction", {"type": "content", "content": "x"}),
    ("service_tier", "priority"),
    ("store", True),
    ("verbosity", "high"),
    ("web_search_options", {}),
    ("moderation", {"model": "x"}),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"messages": []}),
    ("thinking_token_budget", 5),
    ("echo", True),
    ("prompt_cache_retention", "24h"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("user", "x" * 513),
]


@pytest.mark.parametrize("case", REFUSED_BY_CHATS, ids=lambda case: f"{case[0]}-{str(case[1])[:20]}")
def test_what_chats_refuse(case: tuple[Any, ...]) -> None:
    field, value, param, others = (*case, *(case[0], {})[len(case) - 2 :])
    status, answer = post(CHAT, {"messages": MESSAGES, **others, field: value})
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    place = answer["error"]["param"]
    assert place is None if param is None else place == param or place.startswith(f"{param}."), answer
    assert len(answer["error"]["message"]) <= 1000


REFUSED_BY_COMPLETIONS: list[tuple[Any, ...]] = [
    ("prompt", None),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", [64]),
    ("prompt", [-1]),
    ("prompt", ["a", 1]),
    ("prompt", ["a"] * 1025),
    ("max_tokens", 0),
    ("logprobs", 21),
    ("logprobs", True),
    ("best_of", 2),
    ("suffix", "x"),
    ("messages", MESSAGES),
]


@pytest.mark.parametrize("case", REFUSED_BY_COMPLETIONS, ids=lambda case: f"{case[0]}-{str(case[1])[:20]}")
def test_what_completions_refuse(case: tuple[Any, ...]) -> None:
    status, answer = post(TEXT, {"prompt": "hello", case[0]: case[1]})
    assert status == 400, answer
    assert len(answer["error"]["message"]) <= 1000


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("temperature", "top_p", "n", "seed", "stop", "logit_bias", "max_tokens", "tools")),
        dict.fromkeys(("audio", "functions", "function_call", "prediction", "store", "guided_json")),
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "store": False},
        {"service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "response_format": {"type": "text"}},
        {"reasoning_effort": "none", "parallel_tool_calls": True, "include_reasoning": True},
        {"priority": 5, "cache_salt": "x", "add_special_tokens": False, "use_beam_search": False},
    ],
)
def test_what_has_no_effect_on_the_text(fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    if "temperature" in fields:
        body |= {"top_k": 1, "max_completion_tokens": 8}
    status, answer = post(CHAT, body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == ToyTokenizer().decode(greedy(PROMPT, 8, stop_at_eos=False))


def generated(prompt: str, **fields: Any) -> list[int]:
    status, answer = post(TEXT, {"prompt": prompt, "return_token_ids": True, "temperature": 0, **fields})
    assert status == 200, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_what_changes_the_tokens() -> None:
    ids = ToyTokenizer().encode("hello")
    plain = generated("hello", ignore_eos=True)
    assert plain == greedy(ids, 16, stop_at_eos=False), "16 tokens are the default"
    first = plain[0]
    assert generated("hello", logit_bias={str(first): -100})[0] != first
    assert set(generated("hello", logit_bias={"5": 100}, max_tokens=4)) == {5}
    assert set(generated("hello", allowed_token_ids=[7, 8])) <= {7, 8}
    assert generated("hello", stop_token_ids=[plain[3]], ignore_eos=True) == plain[:4]
    assert generated("hello", truncate_prompt_tokens=2, ignore_eos=True) == greedy(ids[-2:], 16, stop_at_eos=False)
    assert generated("hello", max_tokens=3, ignore_eos=True) == plain[:3]
    assert len(generated("hello", max_tokens=30, min_tokens=30)) == 30


def test_a_stop_string_ends_the_text() -> None:
    body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": 40}
    _, whole = post(TEXT, body)
    text = whole["choices"][0]["text"]
    stop = text[10:12]
    _, cut = post(TEXT, {**body, "stop": [stop]})
    choice = cut["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert choice["stop_reason"] == stop
    _, kept = post(TEXT, {**body, "stop": stop, "include_stop_str_in_output": True})
    assert kept["choices"][0]["text"] == text[: text.index(stop) + 2]


def test_a_request_names_its_own_id() -> None:
    _, answer = post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "request_id": "mine"})
    assert answer["id"] == "chatcmpl-mine"


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '{"messages": NaN}', '{"a":' * 1000, '"\\ud800"', b"\xff"])
def test_what_is_not_a_request(body: str | bytes) -> None:
    async def main() -> None:
        async with toy_client() as client:
            answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert "error" in answer.json()

    asyncio.run(main())


def test_only_json_is_taken() -> None:
    """A page of the web may send other types to any server, this one on the same machine included."""

    async def main() -> None:
        async with toy_client() as client:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                answer = await client.post(CHAT, content="{}", headers={"content-type": kind})
                assert answer.status_code == 415

    asyncio.run(main())
