"""Limits on what a client sends, and request ids."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from support.toy_server import toy_client, toy_server

JSON = {"content-type": "application/json"}


def test_bodies() -> None:
    async def main() -> None:
        async with toy_client(max_body_bytes=1000) as client:

            async def chunks(count: int) -> AsyncIterator[bytes]:
                for _ in range(count):
                    yield b" " * 100

            announced = await client.post("/v1/completions", content=b" " * 1001, headers=JSON)
            unannounced = await client.post("/v1/completions", content=chunks(11), headers=JSON)
            for answer in (announced, unannounced):
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "body_too_large"
            for body in (b" " * 1000, chunks(10)):
                assert (await client.post("/v1/completions", content=body, headers=JSON)).status_code == 400
            messages = await client.post("/v1/messages", content=b" " * 1001, headers=JSON)
            assert messages.json() == {
                "type": "error",
                "error": {"type": "request_too_large", "message": "the body must have at most 1000 bytes"},
            }

    asyncio.run(main())


def test_a_body_that_does_not_come() -> None:
    with toy_server(body_timeout_s=0.1) as (server, address):
        connection = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
        assert server.host.loaded.stats().num_running == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [100_000, 100_000_000])
def test_heads(size: int) -> None:
    """One that fits into the socket's buffer gets an answer that says why; a huge one is not even collected."""
    with toy_server() as (_, address):
        connection = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
        sent = 0
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Junk: ")
            while sent < size:
                connection.sendall(b"a" * 10_000)
                sent += 10_000
            connection.sendall(b"\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            assert size > 1_000_000
        else:
            answer = connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 431")
        assert sent < 50_000_000  # while the server is not run, the buffers of both sockets may take 38 million bytes
        connection.close()
        assert httpx.get(f"{address}/health").status_code == 200


def test_many_small_headers() -> None:
    async def main() -> None:
        async with toy_client() as client:
            headers = {f"x-{i}": "a" * 1000 for i in range(70)}
            assert (await client.get("/health", headers=headers)).status_code == 431
            assert (await client.get("/health?" + "a" * 60_000)).status_code == 200
            headers = {"x": "a" * 10_000}
            assert (await client.get("/health?" + "a" * 60_000, headers=headers)).status_code == 431
        async with toy_client(max_header_bytes=1000) as client:
            request = client.build_request("GET", "/health")
            size = sum(len(name) + len(value) for name, value in request.headers.raw)
            for length, status in ((1000, 200), (1001, 431)):
                headers = {"x": "a" * (length - size - 1)}
                assert (await client.get("/health", headers=headers)).status_code == status

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("mine-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("ä", False), ("", False)],
)
def test_request_ids(given: str, is_kept: bool) -> None:
    async def main() -> None:
        async with toy_client(api_keys=("secret",)) as client:
            for path in ("/health", "/load", "/nowhere"):  # 200, 401 and 401
                answer = await client.get(path, headers={"X-Request-Id": given.encode()})
                assert (answer.headers["x-request-id"] == given) == is_kept
                assert len(answer.headers["x-request-id"]) >= 6

    asyncio.run(main())


def test_unknown_routes_and_methods() -> None:
    async def main() -> None:
        async with toy_client() as client:
            for method, path, status in (
                ("GET", "/nowhere", 404),
                ("GET", "/v1/completions", 405),
                ("GET", "/health/", 404),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert answer.headers.get("allow") == ("POST" if status == 405 else None)

    asyncio.run(main())


def test_an_error_that_nobody_expected_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastinfer.server.routes import models

    def fail(server: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr(models, "_models", fail)

    async def main() -> None:
        async with toy_client() as client:
            answer = await client.get("/v1/models")
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "secret" not in answer.text
            assert "x-request-id" in answer.headers

    asyncio.run(main())
