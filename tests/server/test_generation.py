"""The routes answer, plain and as streams, what the engine alone gives."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.toy import ToyTokenizer, greedy
from support.toy_server import NAME, toy_client

MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT = ToyTokenizer().encode("hello,")  # what the toy's template makes of them
OPTIONS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
TEXT = ToyTokenizer().decode(greedy(PROMPT, 12, stop_at_eos=False), skip_special_tokens=False)


def frames(answer: httpx.Response) -> list[Any]:
    """The JSON of a stream's frames, without the last one."""
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


def test_chat() -> None:
    async def main() -> None:
        async with toy_client() as client:
            answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **OPTIONS})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["choices"][0]["message"]["content"] == TEXT
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["model"] == NAME
            assert body["usage"]["prompt_tokens"] == len(PROMPT)
            assert body["usage"]["completion_tokens"] == 12

    asyncio.run(main())


def test_chat_stream() -> None:
    async def main() -> None:
        async with toy_client() as client:
            body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **OPTIONS}
            chunks = frames(await client.post("/v1/chat/completions", json=body))
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            content = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
            assert "".join(content) == TEXT
            assert chunks[-2]["choices"][0]["finish_reason"] == "length"
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 12
            assert all(chunk["usage"] is None for chunk in chunks[:-1])

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts(stream: bool) -> None:
    async def main() -> None:
        async with toy_client() as client:
            prompts = [[5, 6, 7], [9], [12, 13]]
            answer = await client.post("/v1/completions", json={"prompt": prompts, "stream": stream, **OPTIONS})
            chunks = frames(answer) if stream else [answer.json()]
            texts = [""] * 3
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == [
                ToyTokenizer().decode(greedy(prompt, 12, stop_at_eos=False), skip_special_tokens=False)
                for prompt in prompts
            ]

    asyncio.run(main())


def test_probes_and_models() -> None:
    async def main() -> None:
        async with toy_client() as client:
            for path in ("/health", "/ready", "/version", "/load", "/metrics"):
                assert (await client.get(path)).status_code == 200, path
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == [NAME, "toy"]
            model = (await client.get(f"/v1/models/{NAME}")).json()
            assert (model["max_model_len"], model["input_modalities"]) == (96, ["text"])
            missing = await client.get("/v1/models/none")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"

    asyncio.run(main())
