"""The client of OpenAI-compatible servers."""

import asyncio
import re
import socket
import struct
import time
from typing import Any

import pytest
from support.fake_openai_server import FakeOpenAIServer

from fastinfer.client.answer_stream import list_models, stream_deltas
from fastinfer.client.connection import Connection
from fastinfer.client.endpoint import Endpoint
from fastinfer.client.events import EventParser
from fastinfer.errors import FastinferError, RequestError, ServerError

STREAM = b': ping\n\ndata: {"a": 1}\r\n\r\nid: 3\ndata:one\ndata: two\n\n\nevent: x\n\ndata: [DONE]\n\ndata: cut'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_of_a_stream_in_pieces(size: int) -> None:
    parser = EventParser()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    events = [event for piece in pieces for event in parser.push(piece)]
    assert events == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://localhost:8000", "localhost:8000", "/v1"),
        ("http://localhost:8000/v1/", "localhost:8000", "/v1"),
        ("https://example.com/api/v2", "example.com", "/api/v2"),
        ("http://[::1]:80", "[::1]", "/v1"),
        ("http://localhost.", "localhost.", "/v1"),
    ],
)
def test_url(url: str, authority: str, path: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.authority, endpoint.base_path) == (authority, path)


WRONG_URLS = (
    "localhost:8000",
    "ftp://x",
    "http://",
    "http://[",
    "http://x:port",
    "http://localhost..:8000",
    f"http://{'x' * 64}.example",
    "http://x:70000",
    "http://x?a=1",
    "http://x/ü",
    "http://x/a b",
    "http://x/\r\nEvil: 1",
    "http://user:secret@x",
)


@pytest.mark.parametrize("url", WRONG_URLS)
def test_wrong_url(url: str) -> None:
    with pytest.raises(RequestError, match="url: expected") as error:
        Endpoint.parse(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["", "a\r\nEvil: 1", "ü"])
def test_key_that_no_header_can_have(key: str) -> None:
    with pytest.raises(RequestError, match="api key"):
        Endpoint.parse("http://x", key)


async def deltas(endpoint: Endpoint, **fields: Any) -> list[dict[str, Any]]:
    return [delta async for delta in stream_deltas(endpoint, fields)]


def ask(server: FakeOpenAIServer, api_key: str | None = None) -> list[dict[str, Any]]:
    return asyncio.run(deltas(Endpoint.parse(server.url, api_key), messages=[]))


def test_deltas_of_a_chat() -> None:
    with FakeOpenAIServer(reasoning="hm") as server:
        answer = ask(server)
        assert "".join(delta.get("content", "") for delta in answer) == "The sky is blue."
        assert {"reasoning_content": "hm"} in answer
        assert server.requests == [{"messages": [], "stream": True}]
        assert server.paths == ["/v1/chat/completions"]


def test_models() -> None:
    with FakeOpenAIServer() as server:
        assert asyncio.run(list_models(Endpoint.parse(server.url))) == ["fake-model", "another"]
    with FakeOpenAIServer(models=()) as server, pytest.raises(ServerError, match="list a model"):
        asyncio.run(list_models(Endpoint.parse(server.url)))


def test_answers_that_end_with_the_connection() -> None:
    """RFC 9112, section 6.3: so do all answers in HTTP/1.0."""
    with FakeOpenAIServer(states_length=False) as server:
        assert asyncio.run(list_models(Endpoint.parse(server.url))) == ["fake-model", "another"]
        assert "".join(delta.get("content", "") for delta in ask(server)) == "The sky is blue."
    with FakeOpenAIServer(states_length=False, status=503) as server, pytest.raises(ServerError, match="503: no"):
        ask(server)
    with (
        FakeOpenAIServer(states_length=False, cut_after=2) as server,
        pytest.raises(ServerError, match=re.escape("the server's stream ended without [DONE]")),
    ):
        ask(server)


@pytest.mark.parametrize(
    ("interim", "closes", "error"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 0\r\n\r\n", True, None),
        (b"", False, "the connection ended before the answer did"),
    ],
)
def test_end_of_a_connection(interim: bytes, closes: bool, error: str | None) -> None:
    """An answer ends if the server closes the connection, not if the client does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(interim + b"HTTP/1.1 200 OK\r\n\r\nhello")
        if closes:
            writer.close()
        else:
            await reader.read()

    async def request() -> list[bytes]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            endpoint = Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            connection = await Connection.open(endpoint)
            parts: list[bytes] = []

            def on_data(data: bytes) -> None:
                parts.append(data)
                if not closes:
                    connection.close()

            assert await connection.request("GET", "/models", b"", on_data) == 200
            return parts

    if error is None:
        assert b"".join(asyncio.run(request())) == b"hello"
    else:
        with pytest.raises(ServerError, match=error):
            asyncio.run(request())


def test_key_is_sent() -> None:
    with FakeOpenAIServer(api_key="right") as server:
        assert ask(server, "right")
        with pytest.raises(ServerError, match="answered 401: wrong key"):
            ask(server, "wrong")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"status": 400}, RequestError, "the server answered 400: no"),
        ({"status": 503}, ServerError, "the server answered 503: no"),
        ({"cut_after": 2}, ServerError, "the connection ended before the answer did"),
        ({"error_after": 2}, ServerError, "the server's stream failed: it broke"),
    ],
)
def test_failures(settings: dict[str, Any], error: type[FastinferError], message: str) -> None:
    with FakeOpenAIServer(**settings) as server, pytest.raises(error, match=re.escape(message)):
        ask(server)


def test_server_that_is_not_there() -> None:
    with FakeOpenAIServer() as server:
        pass
    with pytest.raises(ServerError, match=f"127.0.0.1:{server.port}: .*[Cc]onne"):
        ask(server)


def test_closing_the_stream_closes_the_connection() -> None:
    async def take_one(endpoint: Endpoint) -> None:
        stream = stream_deltas(endpoint, {"messages": []})
        await anext(stream)
        await stream.aclose()
        while not server.num_abandoned:
            await asyncio.sleep(0.01)

    with FakeOpenAIServer(pieces=("x",) * 1000, before_piece_s=0.01) as server:
        asyncio.run(asyncio.wait_for(take_one(Endpoint.parse(server.url)), 10))


def test_the_fake_server_counts_a_client_that_resets_the_connection() -> None:
    with FakeOpenAIServer(pieces=("x",) * 1000, before_piece_s=0.01) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 15\r\n\r\n" + b'{"messages":[]} ')
            client.recv(1)
        deadline = time.monotonic() + 10
        while not server.num_abandoned and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.num_abandoned == 1


@pytest.mark.parametrize("answer", [b"220 mail.example.com ESMTP\r\n", b"\x16\x03\x01\x02", b"HTTP/9 nonsense\r\n\r\n"])
def test_answer_that_is_not_http(answer: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    async def request() -> None:
        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = await Connection.open(Endpoint.parse(f"http://127.0.0.1:{port}"))
            with pytest.raises(ServerError, match="expected an answer in HTTP, got something else"):
                await connection.request("GET", "/models", b"", lambda data: None)
            connection.close()

    asyncio.run(request())


def test_requests_share_a_connection() -> None:
    async def ask_twice(endpoint: Endpoint) -> list[bytes]:
        connection = await Connection.open(endpoint)
        bodies = []
        for _ in range(2):
            parts: list[bytes] = []
            assert await connection.request("GET", "/models", b"", parts.append) == 200
            bodies.append(b"".join(parts))
        assert connection.is_open
        connection.close()
        return bodies

    with FakeOpenAIServer() as server:
        first, second = asyncio.run(ask_twice(Endpoint.parse(server.url)))
    assert first == second != b""
