"""Load and faults on a real socket: gone clients, full queues, deadlines, drains, slow readers."""

import asyncio
import contextlib
import gc
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import httpx
import pytest
import uvicorn
from support.paths import ROOT
from support.toy import ToyModel, ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_server
from support.waiting import until

from fastinfer.outputs import PrefillOutput
from fastinfer.server import embedding
from fastinfer.server.embedding import embed_all
from fastinfer.server.errors import APIError
from fastinfer.server.generation import RequestOptions
from fastinfer.server.http_protocol import BoundedHttpProtocol
from fastinfer.server.routes import models
from fastinfer.server.sse import PING, EventStream

LONG = {"prompt": [5, 6, 7], "max_tokens": 90, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def gated_server(**options: Any) -> Iterator[tuple[GatedModel, Any, str]]:
    """A server whose engine computes only what it may; all may end when the test does."""
    model = GatedModel()
    with toy_server(model, **options) as (server, address):
        try:
            yield model, server, address
        finally:
            model.allow(2000)


def request_bytes(path: str, body: dict[str, Any], headers: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + headers + b"\r\n" + data


def connect(address: str) -> socket.socket:
    host, port = re.fullmatch(r"http://(.+):(\d+)", address).groups()  # type: ignore[union-attr]
    return socket.create_connection((host, int(port)), timeout=20)


def is_idle(server: Any) -> bool:
    stats = server.host.loaded.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_gone_client_ends_its_request_within_a_step(path: str, stream: bool) -> None:
    body = {**LONG, "stream": stream}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "abc"}], **{k: v for k, v in body.items() if k != "prompt"}}
    with gated_server() as (model, server, address):
        connection = connect(address)
        connection.sendall(request_bytes(path, body))
        model.allow(3)
        until(lambda: len(model.batch_sizes) == 3)
        assert server.host.loaded.stats().num_running == 1
        connection.close()
        until(lambda: server.host.loaded._abandoned or is_idle(server))
        model.allow(1)  # the step that was waiting
        until(lambda: is_idle(server))
        assert len(model.batch_sizes) <= 4


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with gated_server(limits={"max_num_seqs": 1, "max_num_waiting": 1}) as (model, server, address):
        first, second = connect(address), connect(address)
        first.sendall(request_bytes("/v1/completions", LONG))
        model.allow(1)
        until(lambda: server.host.loaded.stats().num_running == 1)
        second.sendall(request_bytes("/v1/completions", LONG))
        model.step_until(lambda: server.host.loaded.stats().num_waiting == 1)
        refused = httpx.post(f"{address}/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "queue_full"
        ready = httpx.get(f"{address}/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the queue is full")
        assert httpx.get(f"{address}/health").status_code == 200
        assert 'admission_rejections_total{engine="0",model_name="org/toy",reason="queue_full"} 1.0' in (
            httpx.get(f"{address}/metrics").text
        )
        model.allow(1000)
        for connection in (first, second):
            assert b"200 OK" in connection.recv(20)
            connection.close()


def test_tokens_that_wait_are_bounded() -> None:
    limits = {"max_num_seqs": 1, "max_num_waiting_tokens": 10}
    with gated_server(limits=limits) as (model, server, address):
        first, second = connect(address), connect(address)
        first.sendall(request_bytes("/v1/completions", LONG))
        model.allow(1)
        until(lambda: server.host.loaded.stats().num_running == 1)
        second.sendall(request_bytes("/v1/completions", {**LONG, "prompt": [1] * 8}))
        model.step_until(lambda: server.host.loaded.stats().num_waiting == 1)
        third = connect(address)
        third.sendall(request_bytes("/v1/completions", {**LONG, "prompt": [1] * 8}))
        model.step_until(lambda: select.select([third], [], [], 0)[0])
        refused = read_until(third, b"}}")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b'"code":"queue_full"' in refused
        for connection in (first, second, third):
            connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_deadlines(stream: bool) -> None:
    """A plain answer has the status 504, a stream that has begun gets an error frame before its end."""
    with gated_server() as (model, server, address), httpx.Client(base_url=address, timeout=30) as client:
        answers = []

        def ask() -> None:
            body, headers = {**LONG, "stream": stream}, {"X-Request-Timeout": "0.2"}
            answers.append(client.post("/v1/completions", json=body, headers=headers))

        thread = threading.Thread(target=ask)
        thread.start()
        model.allow(3)
        until(lambda: len(model.batch_sizes) == 3)
        time.sleep(0.25)  # the deadline passes during a step
        model.allow(1000)
        thread.join(20)
        [answer] = answers
        if stream:
            blocks = answer.text.split("\n\n")
            assert blocks[-2:] == ["data: [DONE]", ""]
            assert json.loads(blocks[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
            assert answer.headers["x-should-retry"] == "false"
        until(lambda: is_idle(server))
        assert client.post("/v1/completions", json=LONG, headers={"X-Request-Timeout": "soon"}).status_code == 400


def test_embeddings_that_wait_too_long() -> None:
    """They have the errors of completions."""
    limits = {"max_num_seqs": 1}
    with gated_server(limits=limits, queue_timeout_s=0.2) as (model, server, address):
        first, waiting, late = connect(address), connect(address), connect(address)
        first.sendall(request_bytes("/v1/completions", LONG))
        model.step_until(lambda: server.host.loaded.stats().num_running == 1)
        waiting.sendall(request_bytes("/v1/embeddings", {"input": "abc"}))
        model.step_until(lambda: server.host.loaded.stats().num_waiting == 1)
        time.sleep(0.25)  # the limit passes during a step
        model.step_until(lambda: select.select([waiting], [], [], 0)[0])
        refused = read_until(waiting, b"}}").lower()
        assert refused.startswith(b"http/1.1 503")
        assert b"retry-after: " in refused
        assert b'"code":"queue_timeout"' in refused
        late.sendall(request_bytes("/v1/embeddings", {"input": "abc"}, b"X-Request-Timeout: 0.01\r\n"))
        model.step_until(lambda: select.select([late], [], [], 0)[0])
        refused = read_until(late, b"}}").lower()
        assert refused.startswith(b"http/1.1 504")
        assert b"x-should-retry: false" in refused
        model.allow(1000)
        for connection in (first, waiting, late):
            connection.close()


def test_texts_of_a_request_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class SlowEngine:
        async def embed(self, text: str, **options: Any) -> PrefillOutput:
            given.append((options["timeout"], options["queue_timeout"]))
            await asyncio.sleep(0.02)
            return PrefillOutput("", [1], "stop", embedding=[1.0])

    monkeypatch.setattr(embedding, "MAX_AT_ONCE", 1)
    options: RequestOptions = {"priority": 0, "adapter": None, "timeout": 5.0, "queue_timeout": 1.0}
    asyncio.run(embed_all(cast(Any, SlowEngine()), {"a": "a", "b": "b", "c": "c"}, options, ""))
    (first, first_wait), (second, second_wait), (third, third_wait) = given
    assert 5 >= first > second + 0.01 > third + 0.02
    assert first_wait <= 1
    assert second_wait is third_wait is None, "the request has begun"
    with pytest.raises(APIError) as error:
        asyncio.run(embed_all(cast(Any, SlowEngine()), {"a": "a", "b": "b"}, {**options, "timeout": 0.01}, ""))
    assert error.value.status == 504


def test_an_error_of_the_engine_ends_with_an_error_and_the_next_request_is_served() -> None:
    model = ToyModel()
    with toy_server(model) as (_, address):
        model.fail = True
        plain = httpx.post(f"{address}/v1/completions", json=LONG)
        assert plain.status_code == 500
        assert "the model broke" not in plain.text
        stream = httpx.post(f"{address}/v1/completions", json={**LONG, "stream": True})
        assert stream.status_code == 500, "nothing had been sent, so there is still a status"
        model.fail = False
        assert httpx.post(f"{address}/v1/completions", json=LONG).status_code == 200


def test_pings_keep_an_idle_stream_open() -> None:
    with gated_server(ping_interval_s=0.05) as (model, _, address):
        connection = connect(address)
        connection.sendall(request_bytes("/v1/completions", {**LONG, "max_tokens": 2, "stream": True}))
        received = b""
        while received.count(b": ping\n\n") < 3:
            received += connection.recv(4096)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"data:" not in received
        model.allow(100)
        while b"[DONE]" not in received:
            received += connection.recv(4096)
        connection.close()


def test_a_slow_reader_holds_up_nobody_and_is_cut_off() -> None:
    """Its socket's buffers are full; the others are served, and in the end its request is not left behind."""
    with toy_server(ping_interval_s=0.05, write_timeout_s=0.2) as (server, address):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = re.fullmatch(r"http://(.+):(\d+)", address).groups()  # type: ignore[union-attr]
        slow.connect((host, int(port)))
        # One answer does not fill the kernel's buffers; log-probabilities of many prompts do.
        body = {**LONG, "prompt": [[5, 6, 7]] * 128, "logprobs": 20, "n": 4, "echo": True, "stream": True}
        slow.sendall(request_bytes("/v1/completions", {**body, "temperature": 1}))
        until(lambda: server.host.loaded.stats().num_running > 0)
        answer = httpx.post(f"{address}/v1/completions", json=LONG, timeout=60)
        text = ToyTokenizer().decode(greedy([5, 6, 7], 90, stop_at_eos=False))
        assert answer.json()["choices"][0]["text"] == text
        until(lambda: is_idle(server) and not server.server_state.tasks, 60)
        until(lambda: len(server.server_state.connections) <= 1)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := slow.recv(1 << 16):
                received += part
        assert b"data: " in received
        assert b"[DONE]" not in received
        slow.close()


def test_a_client_that_does_not_even_take_pings_is_cut_off() -> None:
    async def silent() -> AsyncGenerator[bytes, None]:
        yield b"data: first\n\n"
        await asyncio.Event().wait()

    async def main() -> None:
        sent: list[bytes] = []
        aborted = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent[-1] == PING:
                await asyncio.Event().wait()  # the socket's buffers are full

        async def receive() -> Any:
            await asyncio.Event().wait()

        stream = EventStream(silent(), ping_interval_s=0.01, write_timeout_s=0.01)
        await asyncio.wait_for(stream({"type": "http", "abort": aborted.set}, receive, send), 20)
        assert aborted.is_set()
        assert sent == [b"", b"data: first\n\n", PING]

    asyncio.run(main())


def test_an_error_during_a_stream_has_the_clients_name_of_the_field() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"data: first\n\n"
        raise APIError(400, "the grammar is too complex", param="structured_outputs")

    async def main() -> None:
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"type": "http", "names": {"structured_outputs": "text.format"}}
        await asyncio.wait_for(EventStream(failing())(scope, receive, send), 20)
        assert b'"param":"text.format"' in b"".join(sent)

    asyncio.run(main())


def test_a_client_that_goes_before_its_body_has_come_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with toy_server() as (server, address):
        caplog.clear()
        connection = connect(address)
        connection.sendall(request_bytes("/v1/completions", LONG)[:-5])
        until(lambda: server.server_state.tasks)
        connection.close()
        until(lambda: not (server.server_state.tasks or server.server_state.connections))
        text = httpx.get(f"{address}/metrics").text
    assert not caplog.records
    assert 'status="499"' in text
    assert 'status="500"' not in text


def test_nothing_is_kept_of_a_connection_that_was_reset() -> None:
    """Its keep-alive timer would hold it, its buffers and its last request for 75 s."""
    with toy_server() as (server, address):
        for _ in range(5):
            connection = connect(address)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(connection, b"}")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        until(lambda: not server.server_state.connections)
        until(lambda: not [thing for thing in gc.get_objects() if isinstance(thing, BoundedHttpProtocol)], seconds=5)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


def answers_to(address: str, *packets: bytes, count: int = 1) -> bytes:
    """Send packets one after the other, and return up to ``count`` answers and that of a request behind them."""
    connection = connect(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for packet in packets:
        connection.sendall(packet)
        time.sleep(0.002)
    received = b""
    while received.count(b"HTTP/1.1 ") < count:
        part = connection.recv(1 << 16)
        assert part, received
        received += part
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    while part := connection.recv(1 << 16):
        received += part
    connection.close()
    return received


@pytest.mark.parametrize("where", ["one packet", "behind the head", "in the head", "in the body", "byte by byte"])
def test_a_request_to_upgrade_is_answered_as_if_it_had_none(where: str) -> None:
    """Java's client asks for HTTP/2 with each of its requests, curl with --http2."""
    data = request_bytes("/v1/completions", {**LONG, "max_tokens": 2}, UPGRADE)
    end = data.index(b"\r\n\r\n") + 4
    place = {"behind the head": end, "in the head": data.index(b"h2c"), "in the body": end + 5}.get(where, len(data))
    packets = [data[:place], data[place:]]
    if where == "byte by byte":
        packets = [data[i : i + 1] for i in range(len(data))]
    with toy_server() as (_, address):
        received = answers_to(address, *packets)
    assert received.count(b"HTTP/1.1 200 OK") == 2, received
    assert b'"text":' in received
    assert b'"version":' in received


@pytest.mark.parametrize("split", [False, True])
def test_a_body_behind_an_upgrade_is_no_request(split: bool) -> None:
    """Otherwise a proxy that passes upgrades on would let requests through that it has not seen."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    for length in (b"Content-Length: %d\r\n\r\n" % len(inner) + inner,
                   b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)):  # fmt: skip
        data = b"POST /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + length
        place = data.index(inner) if split else len(data)
        with toy_server() as (_, address):
            received = answers_to(address, data[:place], data[place:])
        assert received.count(b"HTTP/1.1 ") == 2, received
        assert b"HTTP/1.1 405" in received
        assert b"toy" not in received


def test_pipelined_requests_to_upgrade_are_answered_one_after_the_other() -> None:
    data = request_bytes("/v1/completions", {**LONG, "max_tokens": 2})
    upgrade = request_bytes("/v1/completions", {**LONG, "max_tokens": 2}, UPGRADE)
    with toy_server() as (_, address):
        received = answers_to(address, data + upgrade + upgrade + data, count=4)
    assert received.count(b"HTTP/1.1 200 OK") == 5


def test_a_tunnel_is_refused() -> None:
    with toy_server() as (_, address):
        connection = connect(address)
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        connection.close()
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1 ") == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Le"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
# A body that is too large is refused at once, but still comes.
LATE_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n"


@pytest.mark.parametrize(
    "packets",
    [(b"",), (HEAD,), (b"\r\n",), (HEALTH, HEAD), (HEALTH, b"\r\n"), (LATE_BODY, b"x")],
    ids=["nothing", "half a head", "an empty line", "a second head", "a second line", "half a body"],
)
def test_a_connection_on_which_nothing_goes_on_is_closed(packets: tuple[bytes, ...]) -> None:
    with toy_server(body_timeout_s=0.1, keep_alive_s=1, max_body_bytes=1000) as (server, address):
        connection = connect(address)
        for packet in packets:
            connection.sendall(packet)
            if packet in (HEALTH, LATE_BODY):
                read_until(connection, b"}")
        while connection.recv(1 << 16):
            pass
        until(lambda: not server.server_state.connections)
        connection.close()


def test_half_a_head_does_not_end_the_answer_before_it() -> None:
    with gated_server(body_timeout_s=0.1) as (model, server, address):
        connection = connect(address)
        connection.sendall(request_bytes("/v1/completions", {**LONG, "max_tokens": 2}) + HEAD)
        until(lambda: server.host.loaded.stats().num_running > 0 or server.server_state.tasks)
        time.sleep(0.3)
        model.allow(100)
        assert b'"text":' in read_until(connection, b"}}")
        while connection.recv(1 << 16):
            pass
        connection.close()


@pytest.mark.parametrize("size", [30_000, 300_000])  # from 64 KiB on uvicorn is told that the buffer is full
@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"])
def test_a_client_that_does_not_take_its_answer_is_cut_off(
    size: int, headers: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_models", lambda server: [{"id": "x" * size}])
    with toy_server(write_timeout_s=0.2, keep_alive_s=1000) as (server, address):
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = re.fullmatch(r"http://(.+):(\d+)", address).groups()  # type: ignore[union-attr]
        lazy.connect((host, int(port)))
        until(lambda: server.server_state.connections)
        [protocol] = server.server_state.connections
        protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)  # type: ignore[union-attr]
        lazy.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        until(lambda: not server.server_state.connections)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := lazy.recv(1 << 16):
                received += len(part)
        assert received < size
        lazy.close()


def test_a_client_that_takes_something_of_its_answer_is_not_cut_off() -> None:
    loop, transport = mock.Mock(), mock.Mock()
    uvicorn_config = uvicorn.Config(mock.Mock(), log_config=None)
    options: dict[str, Any] = {"config": uvicorn_config, "server_state": uvicorn.server.ServerState(), "app_state": {}}
    protocol = BoundedHttpProtocol(head_timeout_s=1, write_timeout_s=2, _loop=loop, **options)
    protocol.connection_made(transport)
    sizes = iter([100_000, 99_999, 99_998, 99_998])
    transport.get_write_buffer_size = lambda: next(sizes)
    protocol.pause_writing()
    for is_aborted in (False, False, True):
        delay, time_is_up = loop.call_later.call_args.args
        assert delay == 2
        time_is_up()
        assert transport.abort.called == is_aborted


def test_the_server_listens_while_the_model_loads() -> None:
    from support.toy import toy_engine

    from fastinfer import AsyncEngine
    from fastinfer.server.app import create_app
    from fastinfer.server.config import ServerConfig
    from fastinfer.server.draining_server import DrainingServer

    may_load = threading.Event()

    def load() -> AsyncEngine:
        assert may_load.wait(30)
        return AsyncEngine(toy_engine())

    server = DrainingServer(create_app(ServerConfig(("toy",), port=0), load), ServerConfig(("toy",), port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(base_url=server.address) as client:
            assert client.get("/health").json() == {"status": "ok", "state": "loading"}
            assert client.get("/ready").status_code == 503
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["toy"]
            refused = client.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert "retry-after" in refused.headers
            may_load.set()
            until(lambda: client.get("/ready").status_code == 200)
            assert client.post("/v1/completions", json=LONG).status_code == 200
    finally:
        may_load.set()
        server.should_exit = True
        thread.join(20)


def test_a_hanging_step_is_seen() -> None:
    with gated_server(stall_s=0.05) as (model, _, address):
        connection = connect(address)
        connection.sendall(request_bytes("/v1/completions", LONG))
        until(lambda: httpx.get(f"{address}/health").status_code == 503)
        assert "a step has been running" in httpx.get(f"{address}/ready").json()["reason"]
        model.allow(1000)
        until(lambda: httpx.get(f"{address}/health").status_code == 200)
        connection.close()


PROGRAM = """
import sys, threading, time
sys.path[:0] = [{tests!r}]
from support.toy import ToyModel, toy_engine
from fastinfer import AsyncEngine
from fastinfer.server.config import ServerConfig
from fastinfer.server.run import run

class Slow(ToyModel):
    def forward(self, *args):
        time.sleep({step_s})
        return super().forward(*args)

config = ServerConfig(("toy",), port={port}, drain_timeout_s={drain_s})
sys.exit(run(config, lambda: AsyncEngine(toy_engine(model=Slow()))))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_program(step_s: float | str, drain_s: float, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server in a process, and its address; each step takes as many seconds as the expression says."""
    port = free_port()
    program = folder / "serve.py"
    program.write_text(PROGRAM.format(tests=str(ROOT / "tests"), step_s=step_s, drain_s=drain_s, port=port))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen([sys.executable, str(program)], env=environment, stderr=subprocess.PIPE)
    address = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{address}/ready").status_code == 200
        except httpx.TransportError:
            return False

    until(is_ready, 60)
    return process, address


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = connection.recv(1 << 16)
        assert part, received[-300:]
        received += part
    return received


@pytest.mark.slow
def test_sigterm_lets_streams_end_and_refuses_new_work(tmp_path: Path) -> None:
    process, address = start_program(0.03, 30, tmp_path)
    connection, idle = connect(address), httpx.Client(base_url=address)
    assert idle.get("/ready").status_code == 200
    connection.sendall(request_bytes("/v1/completions", {**LONG, "stream": True}))
    received = read_until(connection, b"data:")
    process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{address}/ready").status_code == 503)
    assert httpx.get(f"{address}/health").status_code == 200
    refused = idle.post("/v1/completions", json=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    assert "retry-after" in refused.headers
    received += read_until(connection, b"[DONE]")
    blocks = [block for block in received.decode().replace("\r\n", "\n").split("\n") if block.startswith("data: {")]
    text = "".join(json.loads(block.removeprefix("data: "))["choices"][0]["text"] for block in blocks)
    assert text == ToyTokenizer().decode(greedy([5, 6, 7], 90, stop_at_eos=False))
    assert process.wait(20) == 0
    connection.close()
    idle.close()


@pytest.mark.slow
def test_after_the_drain_streams_get_an_error_frame(tmp_path: Path) -> None:
    process, address = start_program(0.2, 0.5, tmp_path)
    connection = connect(address)
    connection.sendall(request_bytes("/v1/completions", {**LONG, "stream": True}))
    received = read_until(connection, b"data:")
    process.send_signal(signal.SIGTERM)
    received += read_until(connection, b"[DONE]")
    assert b'"code":"aborted"' in received
    assert process.wait(20) == 0
    connection.close()


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_at_once(tmp_path: Path) -> None:
    """Nobody waits for the thread that loads."""
    port, program = free_port(), tmp_path / "serve.py"
    code = PROGRAM.format(tests=str(ROOT / "tests"), step_s=0, drain_s=600, port=port)
    program.write_text(code.replace("lambda: AsyncEngine(toy_engine(model=Slow()))", "lambda: time.sleep(600)"))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen([sys.executable, str(program)], env=environment, stderr=subprocess.PIPE, text=True)

    def is_listening() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").json() == {"status": "ok", "state": "loading"}
        return False

    until(is_listening, 60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("step_s", ["0.2", "600 if self.batch_sizes else 0"])
def test_a_second_signal_ends_at_once(step_s: str, tmp_path: Path) -> None:
    """Nobody waits for a step that hangs."""
    process, address = start_program(step_s, 600, tmp_path)
    connection = connect(address)
    connection.sendall(request_bytes("/v1/completions", {**LONG, "stream": True}))
    read_until(connection, b"data:")
    process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{address}/ready").status_code == 503)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert time.monotonic() - begin < 10, "90 steps take 18 s"
    assert b"Traceback" not in errors
    connection.close()
