"""Requests and answers between gateway and engine."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.toy_server import toy_app

from fastinfer.ray_serve import call as module
from fastinfer.ray_serve.call import Call, Piece, pieces_of
from fastinfer.server.router.prompts import find_prompt

HEADERS = ((b"Content-Type", b"application/json"),)
BODY = {"prompt": "once upon a time", "max_tokens": 6, "temperature": 0}


def completion(**fields: Any) -> Call:
    return Call("POST", "/v1/completions", HEADERS, json.dumps({**BODY, **fields}).encode())


async def collect(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    return [piece async for piece in pieces]


def test_the_prompt_stays_in_the_gateway() -> None:
    prompt = find_prompt({"prompt": "x" * 1000}, b"")
    sent = pickle.loads(pickle.dumps(Call("GET", "/load?a=b", HEADERS, b"body", prompt)))
    assert sent == Call("GET", "/load?a=b", HEADERS, b"body")
    assert sent.prompt.num_bytes == 0
    scope = sent.scope()
    assert (scope["path"], scope["query_string"]) == ("/load", b"a=b")
    assert scope["headers"] == [(b"content-type", b"application/json")]


def test_plain_answers_streams_and_errors_of_a_server() -> None:
    async def run() -> None:
        app = toy_app()
        async with app.router.lifespan_context(app):
            while app.state.server.host.state.value == "loading":
                await asyncio.sleep(0.001)
            [plain] = await collect(pieces_of(app, completion()))
            assert plain.status == 200
            text = json.loads(plain.body)["choices"][0]["text"]
            assert len(text) > 0
            stream = await collect(pieces_of(app, completion(stream=True)))
            assert (b"content-type", b"text/event-stream; charset=utf-8") in stream[0].headers
            frames = b"".join(piece.body for piece in stream).split(b"\n\n")[:-2]
            assert "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames) == text
            [refused] = await collect(pieces_of(app, completion(prompt=3)))
            assert refused.status == 400
            leaving = pieces_of(app, completion(stream=True, max_tokens=200))
            await anext(leaving)
            await leaving.aclose()
            while app.state.server.host.loaded._mailboxes:  # until the request that nobody reads has ended
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_comes_in_quick_succession_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_INTERVAL_S", 1000.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1000):
            await send({"type": "http.response.body", "body": b"%d " % number, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"end"})

    first, second = asyncio.run(asyncio.wait_for(collect(pieces_of(app, completion())), 60))
    assert first.body.startswith(b"0 ")
    assert first.body + second.body == b"".join(b"%d " % number for number in range(1000)) + b"end"


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    error: Exception | None = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        if error is not None:
            raise error

    with pytest.raises(RuntimeError, match="has not ended its answer"):
        asyncio.run(collect(pieces_of(app, completion())))
    error = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect(pieces_of(app, completion())))
