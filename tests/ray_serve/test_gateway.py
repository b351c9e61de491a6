"""The gateway in front of an engine, both in this process: Ray's local testing mode."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest
from support.toy_server import toy_app

from fastinfer.ray_serve.call import Call, Piece, pieces_of
from fastinfer.server.router.app import create_app
from fastinfer.server.router.config import RouterConfig

ray = pytest.importorskip("ray", reason="make ray installs it")
serve = pytest.importorskip("ray.serve", reason="make ray installs it")

from fastinfer.ray_serve.gateway import EnginesHost, without_request_id  # noqa: E402

COMPLETION = {"prompt": "once upon a time", "max_tokens": 20, "temperature": 0}


class ToyEngine:
    """An engine with the toy model. A request whose ``user`` is a number loses it so often."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        self._app = toy_app()
        self._num_lost = Counter[str]()
        await self._app.router.lifespan_context(self._app).__aenter__()
        while self._app.state.server.host.state.value == "loading":
            await asyncio.sleep(0.01)

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        user = json.loads(call.body or b"{}").get("user", "0")
        if user == "full":
            raise serve.exceptions.BackPressureError(1, 1)
        async for piece in pieces_of(self._app, call):
            yield piece
            if self._num_lost[user] < int(user):
                self._num_lost[user] += 1
                raise ray.exceptions.ActorDiedError


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[httpx.AsyncClient]:
    engine = serve.deployment(ToyEngine, name="Engine").bind()
    handle = await asyncio.to_thread(serve.run, engine, _local_testing_mode=True)
    config = RouterConfig()
    host = EnginesHost(config, handle.options(stream=True, method_name="answer"))
    app = without_request_id(create_app(config, host))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60) as client:
        yield client


def text_of(stream: bytes) -> str:
    frames = stream.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    return "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames[:-2])


def test_requests_reach_the_engine() -> None:
    async def run() -> None:
        async with gateway() as client:
            plain = await client.post("/v1/completions", json=COMPLETION)
            assert plain.status_code == 200
            assert "x-request-id" not in plain.headers
            stream = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
            assert text_of(stream.content) == plain.json()["choices"][0]["text"]
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "org/toy"
            refused = await client.post("/v1/completions", json={**COMPLETION, "prompt": 3})
            assert refused.status_code == 400
            refused = await client.post("/sleep?level=1", json={})
            assert refused.status_code == 404
            assert "/sleep would reach one engine;" in refused.json()["error"]["message"]
            assert (await client.get("/load")).json() == {"server_load": 0}

    asyncio.run(run())


def test_a_stream_survives_its_engine() -> None:
    async def run() -> None:
        async with gateway() as client:
            text = (await client.post("/v1/completions", json=COMPLETION)).json()["choices"][0]["text"]
            body = {**COMPLETION, "stream": True}
            stream = await client.post("/v1/completions", json={**body, "user": "2"})
            assert text_of(stream.content) == text
            stream = await client.post("/v1/completions", json={**body, "user": "3"})
            assert b"the replica has died with the request" in stream.content

    asyncio.run(run())


def test_a_full_queue_is_503() -> None:
    async def run() -> None:
        async with gateway() as client:
            answer = await client.post("/v1/completions", json={**COMPLETION, "user": "full"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "queue_full"
            assert "retry-after" in answer.headers

    asyncio.run(run())
