"""Many requests of all kinds at once, most of them hostile: nothing is left behind, and every answer is right.

FASTINFER_SOAK is their number.
"""

import asyncio
import gc
import json
import os
import random
from typing import Any

import httpx
import pytest
from support.toy import ToyTokenizer, greedy
from support.toy_server import toy_server

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


KINDS = (plain, plain, streamed, streamed, cut, abandoned, malformed, wrong_key, huge)


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

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with toy_server(api_keys=("secret",), max_body_bytes=100_000, limits={"block_size": 4}) as (server, address):
        asyncio.run(load(address, 64))
        engine = server.host.loaded
        assert engine is not None

        def settle() -> None:
            for _ in range(2000):
                if not (engine._mailboxes or server.server_state.tasks or server.server_state.connections):
                    break
                asyncio.run(asyncio.sleep(0.01))
            gc.collect()

        settle()
        before = descriptors(), sum(isinstance(thing, asyncio.Task) for thing in gc.get_objects())
        asyncio.run(load(address, COUNT))
        settle()
        assert not engine._mailboxes
        assert not server.server_state.tasks
        stats, manager = engine.stats(), engine._engine.block_manager
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert manager.num_free + manager.num_cached == manager.num_blocks
        after = descriptors(), sum(isinstance(thing, asyncio.Task) for thing in gc.get_objects())
        assert all(new <= old + 2 for new, old in zip(after, before, strict=True)), (before, after)
        assert httpx.get(f"{address}/health").status_code == 200
