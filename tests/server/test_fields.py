"""Every field is honoured or refused by its name."""

import asyncio
import json
import sys
import threading
from typing import Any

import pytest
from pydantic import ValidationError
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_client

from fastinfer.sampling_params import MAX_ALLOWED_TOKEN_IDS
from fastinfer.server.protocol.chat import ChatRequest, Tool, conversation
from fastinfer.server.protocol.completions import CompletionRequest
from fastinfer.server.protocol.embeddings import EmbeddingRequest, ScoreRequest
from fastinfer.server.protocol.messages import MessagesRequest
from fastinfer.server.protocol.responses import ResponsesRequest
from fastinfer.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = ToyTokenizer().encode("hello,")
PART = "messages[0].content[0]"


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
    ("seed", -(2**63) - 1),
    ("seed", 2**63),
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
    ("max_completion_tokens", 0),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("priority", -1),
    ("add_special_tokens", True),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("top_k", -2),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-38),
    ("min_tokens", -1),
    ("stop_token_ids", [64]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [7] * (MAX_ALLOWED_TOKEN_IDS + 1)),
    ("bad_words", [""]),
    ("truncate_prompt_tokens", 0),
    ("prompt_logprobs", 21),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
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
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "king", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": "x", "size": 1}], "messages[0].size"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
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
    ("chat_template_kwargs", {"tools": []}),
    ("chat_template_kwargs", {"documents": []}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("thinking_token_budget", 0),
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


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello", **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return message(content=[{"type": "text", "text": "hello", **fields}])


def form(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "response_format": fields}


def schema(value: Any, name: str | None = "x") -> dict[str, Any]:
    return form(type="json_schema", json_schema={"name": name, **value})


def structured(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "structured_outputs": fields}


CALLS = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
BAD_ARGUMENTS = [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]
NONSENSE = {"type": "nonsense"}
CHOICE = {"tool_choice": {"type": "function"}, "messages": MESSAGES}
TAGS = {"structures": [{"begin": "<", "schema": NONSENSE, "end": ">"}], "triggers": ["<"]}
FORM = "response_format.json_schema.schema"
TOKENS, DETOKENIZE, SCORE, EMBED = "/tokenize", "/detokenize", "/v1/score", "/v1/embeddings"

# Path, body, and the client's own name of the field at fault.
REFUSED_BY_NAME: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, part(bogus=5), PART + ".bogus"),
    (CHAT, part(text=5), PART + ".text"),
    (CHAT, part(text=None), PART + ".text"),
    (CHAT, part(type=None), PART + ".type"),
    (CHAT, part(type="refusal"), PART + ".type"),
    (CHAT, message(content=5), "messages[0].content"),
    (CHAT, message(role=None), "messages[0].role"),
    (CHAT, message(tool_calls=CALLS), "messages[0].tool_calls"),
    (CHAT, message(tool_call_id="a"), "messages[0].tool_call_id"),
    (CHAT, message(reasoning_content="so"), "messages[0].reasoning_content"),
    (CHAT, message(role="tool"), "messages[0].tool_call_id"),
    (CHAT, message(role="function"), "messages[0].name"),
    (CHAT, message(role="assistant", content=None), "messages[0]"),
    (CHAT, message(role="assistant", refusal="no"), "messages[0].refusal"),
    (CHAT, message(role="assistant", tool_calls=BAD_ARGUMENTS), "messages[0].tool_calls[0].function.arguments"),
    (CHAT, form(type="text", json_schema={}), "response_format.json_schema"),
    (CHAT, form(type="json_schema"), "response_format.json_schema"),
    (CHAT, schema({}), FORM),
    (CHAT, schema({"schema": NONSENSE}), FORM),
    (CHAT, schema({"schema": {"x": "y" * 300_000}}), FORM),
    (CHAT, schema({"schema": {}}, None), "response_format.json_schema.name"),
    (CHAT, structured(json=NONSENSE), "structured_outputs.json"),
    (CHAT, structured(json="{"), "structured_outputs.json"),
    (CHAT, structured(regex="((("), "structured_outputs.regex"),
    (CHAT, structured(choice=[]), "structured_outputs.choice"),
    (CHAT, structured(grammar="start: ("), "structured_outputs.grammar"),
    (CHAT, structured(structural_tag={}), "structured_outputs.structural_tag"),
    (CHAT, structured(structural_tag=TAGS), "structured_outputs.structural_tag"),
    (CHAT, {**form(type="text"), **structured(json=NONSENSE)}, "structured_outputs.json"),
    (CHAT, {**form(type="json_object"), **structured(regex="a")}, "structured_outputs"),
    (CHAT, CHOICE, "tool_choice.function"),
    (CHAT, {**CHOICE, "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.type"),
    (CHAT, {**CHOICE, "tool_choice": 5}, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 2**40}, "max_completion_tokens"),
    (TEXT, {"prompt": [64]}, "prompt"),
    (TEXT, {"prompt": "a", "response_format": schema({"schema": NONSENSE})["response_format"]}, FORM),
    (EMBED, {"input": ""}, "input"),
    (EMBED, {"input": ["a", ""]}, "input[1]"),
    (EMBED, {"input": [64]}, "input"),
    (EMBED, {"input": [[1], [-1]]}, "input[1]"),
    (EMBED, {"input": "a", "priority": 2**70}, "priority"),
    (SCORE, {"text_1": "a", "text_2": [""]}, "text_2[0]"),
    (SCORE, {"text_1": ["a", "", "b"], "text_2": ["a", "b", "c"]}, "text_1[1]"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (TOKENS, {"prompt": "a", "tools": []}, "tools"),
    (TOKENS, {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    (TOKENS, {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    (TOKENS, {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    (TOKENS, {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_BY_NAME, ids=lambda case: f"{case[0]}-{case[2]}-{str(case[1])[-30:]}")
def test_errors_have_the_clients_own_names(case: tuple[str, dict[str, Any], str]) -> None:
    path, body, param = case
    if "structured_outputs" in body or "response_format" in body:
        pytest.importorskip("llguidance")
    status, answer = post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]


def test_structured_output_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, answer = post(CHAT, structured(json={"type": "object"}))
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert "pip install 'fastinfer[structured]'" in answer["error"]["message"]


@pytest.mark.parametrize("size", [200, 20_000], ids=["long", "far beyond"])
@pytest.mark.parametrize(
    ("path", "field", "text"),
    [
        (TEXT, "prompt", str),
        (CHAT, "messages", lambda text: message(content=text)["messages"]),
        (EMBED, "input", str),
        ("/v1/responses", "input", str),
    ],
)
def test_a_prompt_that_is_too_long_is_recognised(path: str, field: str, text: Any, size: int) -> None:
    status, answer = post(path, {field: text("a" * size)})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, field, "context_length_exceeded"), answer
    assert error["message"].startswith("This model's maximum context length is 96 tokens: " + field)


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), ("/v1/responses", "input")])
def test_messages_that_the_template_refuses(path: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTokenizer, "chat_template", "{{ raise_exception('no') }}")
    status, answer = post(path, {field: MESSAGES})
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["message"].startswith(f"{field}: the model's chat template failed on them")


def test_there_is_one_limit_of_completions() -> None:
    for n in (9, 128, 129, 10**9):
        _, answer = post(CHAT, {"messages": MESSAGES, "n": n}, limits={"max_num_seqs": 8})
        assert answer["error"]["message"] == f"n must be an integer in 1..8, got {n}"


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "user", "content": "a", "name": "me", "tool_calls": None, "tool_call_id": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}]}],
        [{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "function_call": None}],
        [{"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": None}],
        [{"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning": "so"}],
        [{"role": "assistant", "tool_calls": [{**CALLS[0], "type": "function", "index": 0}]},
         {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "b"}], "name": "f"}],
        [{"role": "function", "name": "f", "content": "b"}],
    ],
)  # fmt: skip
def test_what_clients_send_back_is_taken(turns: list[dict[str, Any]]) -> None:
    status, answer = post(TOKENS, {"messages": [*MESSAGES, *turns, *MESSAGES]})
    assert status == 200, answer


def test_what_the_template_gets_of_messages() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "", "parsed_arguments": {}}, "index": 0}
    messages = conversation(
        [
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
            {"role": "tool", "tool_call_id": "a", "content": "c"},
            {"role": "function", "name": "f", "content": "d"},
            {"role": "assistant", "reasoning": "so", "reasoning_content": "other"},
            {"role": "assistant", "content": "e", "reasoning_content": "so"},
            {"role": "assistant", "reasoning": "so"},
        ]
    )
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert [message.for_template() for message in messages] == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "so"},
        {"role": "tool", "content": "c", "tool_call_id": "a"},
        {"role": "function", "content": "d", "name": "f"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
        {"role": "assistant", "content": "e", "reasoning_content": "so"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]


def test_what_the_template_gets_of_tools() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "strict": True}})
    empty = {"type": "object", "properties": {}}
    assert tool.for_model() == {"type": "function", "function": {"name": "f", "parameters": empty}}
    assert tool.for_model(with_strict=True) == {"type": "function", "function": {"name": "f", "strict": True}}


def test_an_error_says_how_many_more_mistakes_there_are() -> None:
    for fields, end in (({"a": 1}, "request"), ({"a": 1, "b": 2, "n": "x"}, "(and 2 more mistakes)")):
        _, answer = post(TEXT, {"prompt": "hello", **fields})
        assert answer["error"]["message"].endswith(end)


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
    ("max_tokens", -1),
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


def test_each_seed_gives_its_own_text() -> None:
    """The engine has no negative seeds; those of the interface have 64 bits."""
    seeds = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1)
    texts = {seed: generated("hello", temperature=2, ignore_eos=True, seed=seed) for seed in seeds}
    assert texts[-1] != texts[1]
    assert texts[-(2**63) + 1] != texts[-1]
    assert generated("hello", temperature=2, ignore_eos=True, seed=-1) == texts[-1]


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
            for kind in ("application/problem+json", "Application/JSON; charset=utf-8"):
                answer = await client.post(CHAT, content="{}", headers={"content-type": kind})
                assert answer.status_code == 400
            # A page can send a body without a type, too.
            answer = await client.post(CHAT, content="{}")
            assert answer.status_code == 415
            assert answer.json()["error"]["message"] == "Content-Type must be application/json, got none"

    asyncio.run(main())


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("", 415), ("identity", 200)])
def test_compressed_bodies_are_refused_as_such(encoding: str, status: int) -> None:
    async def main() -> None:
        async with toy_client() as client:
            headers = {"content-encoding": encoding}
            answer = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}, headers=headers)
            assert answer.status_code == status
            if status == 415:
                error = answer.json()["error"]
                expected = f"Content-Encoding must be identity or absent, got {encoding or 'an empty one'}"
                assert error["message"] == expected

    asyncio.run(main())


MANY = 3000  # a body of 32 MB has room for millions
UNKNOWN = {f"x{i}": 0 for i in range(MANY)}
# Route, its request, a body in which nearly everything is wrong, and the place of the first mistake.
WRONG_EVERYWHERE: list[tuple[str, type[Any], dict[str, Any], str]] = [
    (CHAT, ChatRequest, {"messages": [0] * MANY}, "messages[0]"),
    (CHAT, ChatRequest, message(content=[0] * MANY), "messages[0].content[0]"),
    (CHAT, ChatRequest, message(**UNKNOWN), "messages[0].x0"),
    (CHAT, ChatRequest, {**UNKNOWN, "messages": MESSAGES}, "x0"),
    (CHAT, ChatRequest, {"messages": MESSAGES, "metadata": UNKNOWN}, "metadata.x0"),
    (CHAT, ChatRequest, {"messages": MESSAGES, "logit_bias": dict.fromkeys(UNKNOWN, "")}, "logit_bias.x0"),
    (CHAT, ChatRequest, {"messages": MESSAGES, "documents": [UNKNOWN] * 100}, "documents[0].x0"),
    (CHAT, ChatRequest, {"messages": MESSAGES, "allowed_token_ids": [""] * MANY}, "allowed_token_ids[0]"),
    (TEXT, CompletionRequest, {"prompt": [""] * (MANY - 1) + [0]}, "prompt"),
    (TEXT, CompletionRequest, {"prompt": [["a"]] * MANY}, "prompt"),
    ("/v1/messages", MessagesRequest, {"model": "toy", "max_tokens": 1, "messages": [0] * MANY}, "messages[0]"),
    ("/v1/responses", ResponsesRequest, {"input": [0] * MANY}, "input[0]"),
    (EMBED, EmbeddingRequest, {"input": [["a"]] * MANY}, "input"),
    (SCORE, ScoreRequest, {"text_1": "a", "text_2": [0] * MANY}, "text_2"),
    (TOKENS, TokenizeRequest, {"messages": [0] * MANY}, "messages[0]"),
    (DETOKENIZE, DetokenizeRequest, {"tokens": [""] * MANY}, "tokens[0]"),
]


@pytest.mark.parametrize("case", WRONG_EVERYWHERE, ids=lambda case: f"{case[0]}-{case[3]}")
def test_of_very_many_mistakes_only_some_are_collected(case: tuple[str, type[Any], dict[str, Any], str]) -> None:
    """Two million took 17 s, in which the server did nothing else, and 3.6 GB."""
    path, model, body, place = case
    with pytest.raises(ValidationError) as error:
        model.model_validate_json(json.dumps(body))
    assert error.value.error_count() <= 100
    status, answer = post(path, body)
    assert status == 400
    assert answer["error"]["message"].startswith(place), answer


def lists_in(schema: Any) -> list[dict[str, Any]]:
    """The schemas of lists whose items are checked, anywhere in a schema."""
    if isinstance(schema, dict):
        found = [found for part in schema.values() for found in lists_in(part)]
        items = schema.get("items_schema")
        return [schema, *found] if schema.get("type") == "list" and items and items["type"] != "any" else found
    if isinstance(schema, list | tuple):
        return [found for part in schema for found in lists_in(part)]
    return []


@pytest.mark.parametrize("model", sorted({case[1] for case in WRONG_EVERYWHERE}, key=str), ids=lambda m: m.__name__)
def test_lists_are_checked_up_to_their_first_mistake(model: type[Any]) -> None:
    lists = lists_in(model.__pydantic_core_schema__)
    assert lists
    for found in lists:
        assert found.get("fail_fast"), found


@pytest.mark.parametrize(
    ("path", "request_type", "name", "body"),
    [
        ("/v1/messages", MessagesRequest, "as_chat", {"model": "toy", "max_tokens": 1, "messages": MESSAGES * 2500}),
        ("/v1/messages/count_tokens", MessagesRequest.__base__, "chat", {"model": "toy", "messages": MESSAGES * 2500}),
        ("/v1/responses", ResponsesRequest, "as_chat", {"input": MESSAGES * 2500}),
        ("/v1/responses/input_tokens", ResponsesRequest.__base__, "chat", {"input": MESSAGES * 2500}),
    ],
)
def test_large_bodies_are_converted_beside_the_event_loop(
    path: str, request_type: type[Any], name: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, threads = getattr(request_type, name), []

    def watched(self: Any) -> Any:
        threads.append(threading.current_thread())
        return convert(self)

    monkeypatch.setattr(request_type, name, watched)
    post(path, body)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
