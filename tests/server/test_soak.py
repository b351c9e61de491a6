"""Many requests of all kinds at once, most of them hostile: nothing is left behind, and every answer is right.

FASTINFER_SOAK is their number; ``FASTINFER_SOAK=10000 pytest -n 0 -s tests/server/test_soak.py`` prints what is left.
"""

import asyncio
import gc
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_server
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from fastinfer.async_engine import OutputStream
from fastinfer.server.http_protocol import BoundedHttpProtocol
from fastinfer.server.sse import EventStream
from fastinfer.serving.mailbox import Mailbox

COUNT = int(os.environ.get("FASTINFER_SOAK", "600"))
KEY = {"Authorization": "Bearer secret"}


def text_of(prompt: list[int], length: int) -> str:
    return ToyTokenizer().decode(greedy(prompt, length, stop_at_eos=False))


async def plain(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    answer = await client.post("/v1/completions", json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    answer = await client.post("/v1/completions", json={**body, "stream": True}, headers=KEY)
    blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block.startswith("data: ")]
    assert blocks.pop() == "[DONE]"
    assert "".join(json.loads(block)["choices"][0]["text"] for block in blocks) == expected


async def chat(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    """The same prompt as a message: the toy's template ends it with a comma."""
    message = {"role": "user", "content": ToyTokenizer().decode(body["prompt"])}
    prompt = [*ToyTokenizer().encode(message["content"]), *ToyTokenizer().encode(",")]
    fields = {"messages": [message], "stream": body["max_tokens"] % 2 == 0}
    fields |= {name: body[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    answer = await client.post("/v1/chat/completions", json=fields, headers=KEY)
    assert answer.status_code == 200, answer.text
    if fields["stream"]:
        blocks = [json.loads(block[6:]) for block in answer.text.split("\n\n") if block.startswith("data: {")]
        assert answer.text.endswith("data: [DONE]\n\n")
        text = "".join(block["choices"][0]["delta"].get("content", "") for block in blocks)
        reason = blocks[-1]["choices"][0]["finish_reason"]
    else:
        [choice] = answer.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == (text_of(prompt, body["max_tokens"]), "length")


async def cut(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=KEY) as answer:
        async for _ in answer.aiter_bytes():
            return


async def abandoned(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    with pytest.raises(httpx.TimeoutException):
        await client.post("/v1/completions", json={**body, "n": 8, "max_tokens": 80}, headers=KEY, timeout=0.002)


async def malformed(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    headers = {**KEY, "content-type": "application/json"}
    assert (await client.post("/v1/completions", content=json.dumps(body)[:-5], headers=headers)).status_code == 400


async def wrong_key(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    answer = await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer guess"})
    assert answer.status_code == 401


async def huge(client: httpx.AsyncClient, body: dict[str, Any], expected: str) -> None:
    try:
        answer = await client.post("/v1/completions", json={**body, "user": "x" * 200_000}, headers=KEY)
    except httpx.TransportError:
        return  # refused before it was sent
    assert answer.status_code == 413


KINDS = (plain, plain, streamed, streamed, chat, chat, cut, abandoned, malformed, wrong_key, huge)


# What a connection and a request consist of; caches may grow meanwhile, within their bounds.
OWN = (BoundedHttpProtocol, RequestResponseCycle, Request, EventStream, OutputStream, Mailbox)
RUNNING = (asyncio.Task, CoroutineType, AsyncGeneratorType)


@dataclass(frozen=True)
class Residue:
    """The resources that a process holds.

    Attributes:
        descriptors: open files.
        requests: objects of connections and requests, running and suspended tasks and generators.
        objects: all objects that the garbage collector follows.
        resident_mb: resident memory.
    """

    descriptors: int
    requests: int
    objects: int
    resident_mb: int

    @classmethod
    def measure(cls) -> "Residue":
        gc.collect()
        objects = gc.get_objects()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            len(os.listdir("/proc/self/fd")),
            sum(issubclass(type(thing), OWN + RUNNING) for thing in objects),
            len(objects),
            pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        )


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    generator = random.Random(1)

    async def load(address: str, count: int) -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120) as client:
            room = asyncio.Semaphore(64)

            async def one(number: int) -> None:
                prompt = [generator.randrange(1, 29) for _ in range(generator.randrange(1, 30))]
                length = generator.randrange(1, 30)
                body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
                async with room:
                    await KINDS[number % len(KINDS)](client, body, text_of(prompt, length))

            await asyncio.gather(*(one(number) for number in range(count)))

    with toy_server(api_keys=("secret",), max_body_bytes=100_000, limits={"block_size": 4}) as (server, address):
        asyncio.run(load(address, 64 + COUNT // 10))
        engine = server.host.loaded
        assert engine is not None

        def settle() -> None:
            for _ in range(2000):
                if not (engine._mailboxes or server.server_state.tasks or server.server_state.connections):
                    break
                asyncio.run(asyncio.sleep(0.01))

        settle()
        before = Residue.measure()
        asyncio.run(load(address, COUNT))
        settle()
        assert not engine._mailboxes
        assert not server.server_state.tasks
        stats, manager = engine.stats(), engine._engine.block_manager
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert manager.num_free + manager.num_cached == manager.num_blocks
        after = Residue.measure()
        print(f"\nbefore {COUNT} requests {before}\nafter {after}")
        assert after.descriptors <= before.descriptors + 2
        assert after.requests <= before.requests + 2
        assert httpx.get(f"{address}/health").status_code == 200
