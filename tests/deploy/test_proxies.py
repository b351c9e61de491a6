"""nginx and HAProxy in front of servers, with the files of deploy/: streams, gone clients, refusals, drains."""

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.proxies import PROXIES, find_program, proxy, trusting
from support.toy import ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_server
from support.waiting import until

from fastinfer.server.host_state import HostState
from fastinfer.server.http_protocol import BoundedHttpProtocol

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
LONG = {"prompt": PROMPT, "max_tokens": 90, "temperature": 0, "ignore_eos": True}


@dataclass
class Site:
    """A proxy and the one server behind both of its entries."""

    model: GatedModel
    server: Any
    address: str
    context: ssl.SSLContext

    def client(self) -> Any:
        return httpx.Client(base_url=self.address, verify=self.context, timeout=30)

    def connect(self) -> ssl.SSLSocket:
        url = urlsplit(self.address)
        plain = socket.create_connection((url.hostname, url.port), timeout=20)
        return self.context.wrap_socket(plain, server_hostname=url.hostname)


@pytest.fixture(params=PROXIES)
def name(request: pytest.FixtureRequest) -> str:
    for program in (request.param, "openssl"):
        if find_program(program) is None:
            pytest.skip(f"needs {program} (Debian: apt-get install {program})")
    return str(request.param)


@contextlib.contextmanager
def site(name: str, folder: Path, **options: Any) -> Iterator[Site]:
    model = GatedModel()
    with toy_server(model, **options) as (server, address):
        try:
            with proxy(name, [address, address], folder) as front:
                yield Site(model, server, front, trusting(folder))
        finally:
            model.allow(2000)


def test_tokens_arrive_one_by_one(name: str, tmp_path: Path) -> None:
    """Each token is read before the next one may be computed."""
    with site(name, tmp_path) as s, s.client() as client:
        body = {**LONG, "stream": True, "return_token_ids": True}
        s.model.allow(1)
        tokens: list[int] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    new = json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    tokens += new or []
                    s.model.allow(len(new or []))
        assert tokens == greedy(PROMPT, 90, stop_at_eos=False)


def test_connections_are_kept(name: str, tmp_path: Path) -> None:
    """On both sides of the proxy."""
    with site(name, tmp_path) as s:
        connection = s.connect()
        for _ in range(20):
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                part = connection.recv(1 << 16)
                assert part, "the proxy has closed the connection"
                received += part
            assert received.startswith(b"HTTP/1.1 200")
        connection.close()
        time.sleep(0.5)  # a connection that is not kept is gone by then
        until(lambda: len(s.server.server_state.connections) <= 4)  # of two workers and two entries, without a probe
        assert len(s.server.server_state.connections) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_gone_client_is_noticed(name: str, stream: bool, tmp_path: Path) -> None:
    with site(name, tmp_path) as s:
        connection = s.connect()
        data = json.dumps({**LONG, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        s.model.allow(3)
        until(lambda: len(s.model.batch_sizes) == 3)
        assert s.server.host.loaded.stats().num_running == 1
        connection.close()
        until(lambda: s.server.host.loaded._abandoned or s.server.host.loaded.stats().num_running == 0)
        s.model.allow(1)  # the step that was waiting
        until(lambda: s.server.host.loaded.stats().num_running == 0)
        assert len(s.model.batch_sizes) <= 4


def test_a_full_queue_says_when_to_come_back(name: str, tmp_path: Path) -> None:
    limits = {"max_num_seqs": 1, "max_num_waiting": 1}
    with (
        site(name, tmp_path, limits=limits) as s,
        s.client() as client,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        stats = s.server.host.loaded.stats
        first = pool.submit(client.post, "/v1/completions", json=LONG)
        s.model.allow(1)
        until(lambda: stats().num_running == 1)
        second = pool.submit(client.post, "/v1/completions", json=LONG)
        s.model.step_until(lambda: stats().num_waiting == 1)
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "overloaded_error"
        s.model.allow(1000)
        assert [first.result().status_code, second.result().status_code] == [200, 200]


def test_a_stream_goes_on_while_its_server_drains(name: str, tmp_path: Path) -> None:
    """Also when the proxy has noticed that the server takes no more requests."""
    with site(name, tmp_path) as s, s.client() as client:
        s.model.allow(3)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            s.server.handle_exit(signal.SIGTERM, None)
            own = {"nginx": "the server is shutting down", "haproxy": "no server is ready"}[name]
            until(lambda: client.post("/v1/completions", json=LONG).json()["error"]["message"] == own)
            s.model.allow(1000)
            received += [line for line in lines if line]
        frames = [json.loads(line.removeprefix("data: ")) for line in received[:-1]]
        assert received[-1] == "data: [DONE]"
        text = "".join(frame["choices"][0]["text"] for frame in frames)
        assert text == ToyTokenizer().decode(greedy(PROMPT, 90, stop_at_eos=False))


def test_statuses_of_what_is_too_large(name: str, tmp_path: Path) -> None:
    with site(name, tmp_path) as s, s.client() as client:
        s.model.allow(1000)
        large = {**LONG, "prompt": "a" * (31 << 20)}  # longer than the model's context
        assert client.post("/v1/completions", json=large).status_code == 400
        too_large = client.post("/v1/completions", json={**LONG, "prompt": "a" * (33 << 20)})
        assert too_large.status_code == 413
        assert too_large.json()["error"]["code"] == "body_too_large"
        assert client.get("/version", headers={"X-Padding": "a" * 60_000}).status_code == 200
        head = client.get("/version", headers={"X-Padding": "a" * 70_000})
        assert head.status_code == 431
        assert head.json()["error"]["type"] == "invalid_request_error"
        assert client.get("/version", headers={"X-Padding": "a" * 200_000}).status_code in (400, 431)
        assert client.get("/version").status_code == 200
        assert client.get("/").headers["content-security-policy"].startswith("default-src 'none'")


def test_no_request_fails_while_a_server_drains_and_ends(name: str, tmp_path: Path) -> None:
    body = {**LONG, "max_tokens": 8}
    text = ToyTokenizer().decode(greedy(PROMPT, 8, stop_at_eos=False))
    with toy_server() as (first, one), toy_server() as (second, two), proxy(name, [one, two], tmp_path) as front:
        stop, answers = threading.Event(), []

        def ask() -> None:
            with httpx.Client(base_url=front, verify=trusting(tmp_path), timeout=30) as client:
                while not stop.is_set():
                    answer = client.post("/v1/completions", json=body)
                    answers.append((answer.status_code, answer.json().get("choices", [{}])[0].get("text")))

        def count_more(number: int) -> None:
            target = len(answers) + number
            until(lambda: len(answers) >= target or not all(status == 200 for status, _ in answers))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            count_more(50)
            assert first.server_state.total_requests > 5
            assert second.server_state.total_requests > 5
            first.handle_exit(signal.SIGTERM, None)
            count_more(50)
            until(lambda: first.should_exit)
            count_more(50)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert set(answers) == {(200, text)}


@pytest.mark.skipif(find_program("haproxy") is None, reason="needs haproxy (Debian: apt-get install haproxy)")
def test_haproxy_asks_whether_servers_are_ready(tmp_path: Path) -> None:
    """A draining server is sent a few requests at most; once it is ready again, it gets its share."""

    def num_completions(server: Any) -> int:
        text = httpx.get(f"{server.address}/metrics").text
        counts = re.findall(r'^http_requests_total\{.*"/v1/completions".*\} (\S+)$', text, re.MULTILINE)
        return round(sum(map(float, counts)))

    body = {**LONG, "max_tokens": 2}
    with (
        toy_server() as (first, one),
        toy_server() as (second, two),
        proxy("haproxy", [one, two], tmp_path) as front,
        httpx.Client(base_url=front, verify=trusting(tmp_path), timeout=30) as client,
    ):

        def ask() -> tuple[int, int]:
            before = num_completions(first), num_completions(second)
            assert [client.post("/v1/completions", json=body).status_code for _ in range(10)] == [200] * 10
            return num_completions(first) - before[0], num_completions(second) - before[1]

        assert min(ask()) > 2
        first.host.state = HostState.DRAINING
        until(lambda: ask() == (0, 10))
        first.host.state = HostState.READY
        until(lambda: min(ask()) > 2)
        first.host.state = second.host.state = HostState.DRAINING
        until(lambda: client.post("/v1/completions", json=body).json()["error"]["message"] == "no server is ready")
        refused = client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")


def test_requests_to_upgrade_are_answered_and_not_passed_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's client sends one with each request."""
    passed_on = []
    rewrite = BoundedHttpProtocol._head_without_upgrade

    def watched(protocol: BoundedHttpProtocol) -> bytes:
        passed_on.append(protocol.headers)
        return rewrite(protocol)

    monkeypatch.setattr(BoundedHttpProtocol, "_head_without_upgrade", watched)
    headers = {"Connection": "Upgrade", "Upgrade": "h2c, other"}  # HAProxy itself takes h2c out
    with site(name, tmp_path) as s, s.client() as client:
        s.model.allow(400)
        for _ in range(2):
            answer = client.post("/v1/completions", json=LONG, headers=headers)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 90
            assert client.get("/health", headers=headers).status_code == 200
    assert not passed_on
