"""The router in front of toy servers: what it passes on, and what happens when replicas refuse, drain or die."""

import asyncio
import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.fake_openai_server import FakeOpenAIServer
from support.routers import BreakingProxy, router_host, router_server
from support.toy_server import NAME, GatedModel, toy_server

from fastinfer.server.host_state import HostState
from fastinfer.server.router.prompts import Prompt
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.routed_request import RoutedRequest

COMPLETION = {"prompt": "once upon a time", "max_tokens": 8, "temperature": 0}


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request for a completion has been sent, and nothing is read."""
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


@pytest.fixture(scope="module")
def toys() -> Iterator[list[str]]:
    with toy_server() as (_, first), toy_server() as (_, second):
        yield [first, second]


@pytest.mark.parametrize("turns", range(4))
def test_probes_end_though_their_cancellation_is_lost(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some turn of the event loop the answer is there, and the probe does not know it yet."""

    async def main() -> None:
        answered = asyncio.Event()

        async def ask_state(replica: Replica, path: str) -> tuple[str, dict[str, Any]]:
            await answered.wait()
            return "", {}

        monkeypatch.setattr("fastinfer.server.router.host.ask_state", ask_state)
        routing = router_host(["http://127.0.0.1:9"])
        await routing.start()
        await asyncio.sleep(0.01)
        answered.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(routing.stop(), 5)

    asyncio.run(main())


def test_answers_are_those_of_the_replicas(toys: list[str]) -> None:
    def essence(answer: httpx.Response) -> Any:
        return answer.status_code, {**answer.json(), "id": None, "created": None}

    with router_server(toys) as (_, url):
        for path, body in (
            ("/v1/completions", COMPLETION),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}),
            ("/v1/completions", {"prompt": 3}),
            ("/v1/completions", {**COMPLETION, "model": "nobody"}),
            ("/tokenize", {"prompt": "abc"}),
            ("/v1/embeddings", {"input": "abc"}),
        ):
            assert essence(httpx.post(url + path, json=body)) == essence(httpx.post(toys[0] + path, json=body)), path
        answer = httpx.post(url + "/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert len(answer.headers.get_list("date")) == 1
        for content, kind in ((b"{", "application/json"), (b"{}", "text/plain")):
            wrong = [
                httpx.post(address + "/v1/completions", content=content, headers={"Content-Type": kind})
                for address in (url, toys[0])
            ]
            assert essence(wrong[0]) == essence(wrong[1])
        for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")):
            answers = [httpx.request(method, address + path) for address in (url, toys[0])]
            assert [answer.json()["error"]["code"] for answer in answers] == ["response_not_found"] * 2
        assert httpx.post(url + "/v1/nothing", json={}).status_code == 404
        assert httpx.get(url + "/v1/completions").status_code == 405


def test_own_routes(toys: list[str]) -> None:
    with router_server(toys) as (host, url):
        assert httpx.get(url + "/health").json() == {"status": "ok"}
        assert httpx.get(url + "/ready").json() == {"status": "ok"}
        assert [model["id"] for model in httpx.get(url + "/v1/models").json()["data"]] == [NAME, "toy"]
        assert httpx.get(url + f"/v1/models/{NAME}").json()["id"] == NAME
        assert httpx.get(url + "/v1/models/nobody").json()["error"]["code"] == "model_not_found"
        assert httpx.get(url + "/load").json() == {"server_load": 0}
        for _ in range(3):
            text_of(httpx.post(url + "/v1/completions", json={**COMPLETION, "prompt": "a" * 80}))
        lines = httpx.get(url + "/metrics").text.splitlines()
        for replica in host.replicas:
            assert f'fastinfer_router_replica_ready{{replica="{replica.name}"}} 1.0' in lines
            assert f'fastinfer_router_requests_running{{replica="{replica.name}"}} 0.0' in lines
        sent = [line for line in lines if line.startswith("fastinfer_router_requests_total")]
        assert sum(float(line.split()[-1]) for line in sent) == 3
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 3.0' in lines


def test_metrics_of_replicas_that_nobody_else_can_ask() -> None:
    toys = [toy_server(metrics_prefix="mine") for _ in range(2)]
    with toys[0] as (_, one), toys[1] as (_, two), router_server([one, two]) as (host, url):
        host.replicas[1].name = "process 1"
        host.has_private_replicas = True
        for letter in "ab":
            text_of(httpx.post(url + "/v1/completions", json={**COMPLETION, "prompt": letter}))
        lines = httpx.get(url + "/metrics").text.splitlines()
    success = [line for line in lines if line.startswith("mine:request_success_total{") and line.endswith(" 1.0")]
    assert [re.findall('replica="(.*?)"', line) for line in success] == [[host.replicas[0].name], ["process 1"]]
    for name in ("mine:request_success_total", "http_requests_total", "http_request_duration_seconds"):
        assert len([line for line in lines if line.startswith(f"# TYPE {name} ")]) == 1
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 2.0' in lines


def test_limits(toys: list[str]) -> None:
    with router_server(toys, max_body_bytes=1000) as (_, url):
        answer = httpx.post(url + "/v1/completions", json={**COMPLETION, "prompt": "a" * 1000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert httpx.get(url + "/health", headers={"X-Junk": "a" * 70_000}).status_code == 431
        assert httpx.get(url + "/health", headers={"Host": "evil.example"}).status_code == 403


def test_keys() -> None:
    """The client's key goes to the replica; the router asks for one if it has any."""
    with toy_server(api_keys=("secret",), admin_keys=("boss",)) as (_, toy):
        with router_server([toy]) as (_, url):
            assert httpx.post(url + "/v1/completions", json=COMPLETION).status_code == 401
            assert httpx.get(url + "/v1/models").status_code == 401
            for key in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
                text_of(httpx.post(url + "/v1/completions", json=COMPLETION, headers=key))
                assert httpx.get(url + "/v1/models", headers=key).status_code == 200
        with router_server([toy], api_keys=("secret",)) as (host, url):
            assert httpx.post(url + "/v1/completions", json=COMPLETION).status_code == 401
            assert httpx.get(url + "/metrics").status_code == 401
            assert host.replicas[0].last_chosen == 0
            text_of(httpx.post(url + "/v1/completions", json=COMPLETION, headers={"X-Api-Key": "secret"}))


def test_administrators_reach_all_replicas() -> None:
    key = {"X-Api-Key": "boss"}
    with (
        toy_server(admin_keys=("boss",)) as (first, one),
        toy_server(admin_keys=("boss",)) as (second, two),
        router_server([one, two]) as (host, url),
    ):
        assert httpx.post(url + "/sleep").status_code == 403
        assert httpx.post(url + "/sleep?level=1", headers=key).json() == {"is_sleeping": True}
        assert all(server.host.loaded.health().is_sleeping for server in (first, second))  # type: ignore[attr-defined]
        wait_until(lambda: httpx.get(url + "/ready").status_code == 503)
        assert httpx.get(url + "/is_sleeping").status_code == 403
        assert httpx.get(url + "/is_sleeping", headers=key).json() == {"is_sleeping": True}
        assert httpx.post(one + "/wake_up", headers=key).json() == {"is_sleeping": False}
        assert httpx.get(url + "/is_sleeping", headers=key).json() == {"is_sleeping": True}
        assert httpx.post(url + "/wake_up", headers=key).json() == {"is_sleeping": False}
        assert httpx.get(url + "/is_sleeping", headers=key).json() == {"is_sleeping": False}
        wait_until(lambda: all(replica.is_ready for replica in host.replicas))


def test_sleepers_are_woken_though_another_server_is_down() -> None:
    key = {"X-Api-Key": "boss"}
    with (
        toy_server(admin_keys=("boss",)) as (_, toy),
        BreakingProxy(toy) as proxy,
        router_server([toy, proxy.url]) as (host, url),
    ):
        proxy.set_down(True)
        wait_until(lambda: not host.replicas[1].is_reachable)
        assert httpx.post(url + "/sleep", headers=key).status_code == 200
        assert httpx.post(url + "/wake_up", headers=key).json() == {"is_sleeping": False}
        wait_until(lambda: host.replicas[0].is_ready)


def test_a_server_that_is_down_or_hangs_keeps_nobody_from_the_others() -> None:
    key = {"X-Api-Key": "boss"}
    settings = {"probe_interval_s": 60, "probe_timeout_s": 0.2}
    with (
        toy_server(admin_keys=("boss",)) as (_, toy),
        BreakingProxy(toy) as proxy,
        router_server([toy, proxy.url], **settings) as (host, url),
    ):

        def ask(method: str, path: str) -> httpx.Response:
            for replica in host.replicas:  # though nobody knows yet
                replica.set_ready()
            answer = httpx.request(method, url + path, headers=key, timeout=20)
            assert answer.status_code == 200, answer.text
            wait_until(lambda: not host.replicas[1].is_ready)  # it is asked at once
            return answer

        proxy.is_silent = True
        assert [model["id"] for model in ask("GET", "/v1/models").json()["data"]] == [NAME, "toy"]
        proxy.set_down(True)
        assert ask("GET", f"/v1/models/{NAME}").json()["id"] == NAME
        for path in ("/reset_prefix_cache", "/sleep", "/wake_up"):
            answer = ask("POST", path)
            assert answer.headers["x-left-out"] == host.replicas[1].name
        host.replicas[0].set_unready("as an example", is_reachable=False)
        answer = httpx.post(url + "/wake_up", headers=key)
        assert answer.status_code == 503
        assert all(replica.name in answer.json()["error"]["message"] for replica in host.replicas)


def test_servers_that_are_awake_again_take_the_next_request() -> None:
    key = {"X-Api-Key": "boss"}
    with (
        toy_server(admin_keys=("boss",)) as (_, one),
        toy_server(admin_keys=("boss",)) as (_, two),
        toy_server(admin_keys=("boss",)) as (ending, three),
        router_server([one, two, three]) as (host, url),
    ):
        ending.host.state = HostState.DRAINING
        for _ in range(5):
            assert httpx.post(url + "/sleep", headers=key).status_code == 200
            answer = httpx.post(url + "/wake_up", headers=key)
            assert (answer.json(), answer.headers["x-left-out"]) == ({"is_sleeping": False}, host.replicas[2].name)
            text_of(httpx.post(url + "/v1/completions", json=COMPLETION))


def test_caches_of_all_servers_are_reset() -> None:
    key = {"X-Api-Key": "boss"}
    with contextlib.ExitStack() as stack:
        toys = [toy_server(admin_keys=("boss",), response_cache="memory") for _ in range(2)]
        urls = [stack.enter_context(toy)[1] for toy in toys]
        host, url = stack.enter_context(router_server(urls, probe_interval_s=60))
        for letter, toy in zip("abc", [urls[0], urls[1], urls[1]], strict=True):
            text_of(httpx.post(toy + "/v1/completions", json={**COMPLETION, "prompt": letter}))
        host.replicas[1].set_unready("the queue is full")
        answer = httpx.post(url + "/reset_response_cache", json={}, headers=key)
        assert answer.json() == {"num_dropped": 3}
        assert "x-left-out" not in answer.headers


def test_an_error_of_any_server_is_the_answer() -> None:
    key = {"X-Api-Key": "boss"}
    with (
        toy_server(admin_keys=("boss",), response_cache="memory") as (_, cached),
        toy_server(admin_keys=("boss",)) as (_, plain),
    ):
        for urls in ([cached, plain], [plain, cached]):
            with router_server(urls) as (_, url):
                answer = httpx.post(url + "/reset_response_cache", json={}, headers=key)
                assert answer.status_code == 400
                assert "no response cache" in answer.json()["error"]["message"]


def test_the_page_is_there_for_head_too(toys: list[str]) -> None:
    with router_server(toys) as (_, url), httpx.Client(base_url=url) as client:
        for _ in range(2):  # on one connection
            answer = client.head("/")
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-length"] == str(len(client.get("/").content))


def test_a_stream_is_not_buffered_and_ends_with_its_client() -> None:
    model = GatedModel()
    with toy_server(model) as (server, toy), router_server([toy]) as (host, url):
        engine = server.host.loaded  # type: ignore[attr-defined]
        connection = send(url, {**COMPLETION, "max_tokens": 60, "stream": True, "ignore_eos": True})
        model.step_until(lambda: engine.stats().num_running == 1)
        model.allow(3)
        received = b""
        while b'"text"' not in received:
            received += connection.recv(4096)
        assert host.replicas[0].num_running == engine.stats().num_running == 1
        connection.close()
        model.step_until(lambda: engine.stats().num_running == 0 and host.replicas[0].num_running == 0)
        model.allow(1000)


def test_a_plain_request_ends_with_its_client() -> None:
    model = GatedModel()
    with toy_server(model) as (server, toy), router_server([toy]) as (host, url):
        engine = server.host.loaded  # type: ignore[attr-defined]
        connection = send(url, {**COMPLETION, "max_tokens": 60, "ignore_eos": True})
        model.step_until(lambda: engine.stats().num_running == 1)
        assert host.replicas[0].num_running == 1
        connection.close()
        model.step_until(lambda: engine.stats().num_running == 0 and host.replicas[0].num_running == 0)
        model.allow(1000)


def test_a_replica_that_is_down_is_passed_over(toys: list[str]) -> None:
    with BreakingProxy(toys[0]) as proxy, router_server([proxy.url, toys[1]], probe_interval_s=0.05) as (host, url):
        proxy.set_down(True)
        for letter in "abcdef":
            text_of(httpx.post(url + "/v1/completions", json={**COMPLETION, "prompt": letter}))
        wait_until(lambda: not host.replicas[0].is_ready)
        assert httpx.get(url + "/ready").status_code == 200
        proxy.set_down(False)
        wait_until(lambda: host.replicas[0].is_ready)


def test_one_that_is_down_will_have_computed_nothing(toys: list[str]) -> None:
    with BreakingProxy(toys[0]) as proxy, router_server([proxy.url]) as (host, _):
        [replica] = host.replicas
        replica.prefixes.add(Prompt((1, 2, 3)))
        proxy.set_down(True)
        wait_until(lambda: not len(replica.prefixes))


def test_a_plain_answer_that_breaks_off_is_computed_elsewhere(toys: list[str]) -> None:
    expected = text_of(httpx.post(toys[0] + "/v1/completions", json=COMPLETION))
    with BreakingProxy(toys[0]) as first, BreakingProxy(toys[1]) as second:
        with router_server([first.url, second.url]) as (_, url):
            for number in range(20):
                first.break_after = second.break_after = 1 + 17 * number
                assert text_of(httpx.post(url + "/v1/completions", json=COMPLETION)) == expected
        assert first.num_broken + second.num_broken > 20


def test_a_request_that_kills_its_replicas_reaches_few(toys: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(BreakingProxy(toys[0])) for _ in range(5)]
        _, url = stack.enter_context(router_server([proxy.url for proxy in proxies]))
        for proxy in proxies:
            proxy.break_after, proxy.breaks_again = 1, True
        answer = httpx.post(url + "/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert sum(proxy.num_broken > 0 for proxy in proxies) == 3


def test_nobody_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    with router_server(["http://127.0.0.1:1"], is_ready=False) as (host, url):
        answer = httpx.post(url + "/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers
        assert httpx.get(url + "/v1/models").status_code == 503
        wait_until(lambda: "127.0.0.1:1: Connect" in httpx.get(url + "/ready").json()["reason"])
        for _ in range(2):  # further questions, whose answers are the same
            host.replicas[0].was_probed.clear()
            wait_until(host.replicas[0].was_probed.is_set)
    assert len([line for line in caplog.messages if "127.0.0.1:1 is not ready: 127.0.0.1:1: Connect" in line]) == 1


def test_a_model_that_not_all_replicas_have(toys: list[str]) -> None:
    with toy_server(names=("other",)) as (_, other), router_server([other, *toys]) as (_, url):
        assert [model["id"] for model in httpx.get(url + "/v1/models").json()["data"]] == ["other", NAME, "toy"]
        for model in ("other", "toy") * 4:
            text_of(httpx.post(url + "/v1/completions", json={**COMPLETION, "model": model}))
        answer = httpx.post(url + "/v1/completions", json={**COMPLETION, "model": "nobody"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert httpx.get(url + "/ready").status_code == 200


def test_a_prompt_that_no_queue_has_room_for_leaves_the_replica_to_others() -> None:
    model = GatedModel()
    limits = {"max_num_seqs": 1, "max_num_waiting_tokens": 20}
    with toy_server(model, limits) as (server, toy), router_server([toy], probe_interval_s=60) as (_, url):
        engine = server.host.loaded  # type: ignore[attr-defined]
        running = send(url, COMPLETION)
        model.step_until(lambda: engine.stats().num_running == 1)
        waiting = send(url, {**COMPLETION, "prompt": [1] * 8})
        model.step_until(lambda: engine.stats().num_waiting == 1)
        large = send(url, {**COMPLETION, "prompt": [1] * 15})
        model.step_until(lambda: select.select([large], [], [], 0)[0])
        assert b"queue_full" in large.recv(4096)
        small = send(url, {**COMPLETION, "prompt": [1] * 10})
        model.allow(1000)
        for connection in (running, waiting, small):
            assert b"200 OK" in connection.recv(20)
        for connection in (running, waiting, large, small):
            connection.close()


def test_a_model_of_a_replica_that_is_not_ready_is_not_unknown(toys: list[str]) -> None:
    body = {**COMPLETION, "model": "other"}
    with (
        toy_server(names=("other",)) as (server, other),
        router_server([other, *toys], probe_interval_s=60) as (host, url),
    ):
        server.host.state = HostState.DRAINING
        for _ in range(2):  # it refuses the first request, and is not asked again
            answer = httpx.post(url + "/v1/completions", json=body)
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        answer = httpx.get(url + "/v1/models/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert host.replicas[0].name in answer.json()["error"]["message"]
        server.host.state = HostState.READY
        host.replicas[0].wake_probe.set()
        wait_until(lambda: host.replicas[0].is_ready)
        text_of(httpx.post(url + "/v1/completions", json=body))


def test_messages_that_a_replica_refuses_go_to_another(toys: list[str]) -> None:
    body = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    with (
        toy_server() as (server, full),
        toy_server(names=("other",)) as (_, other),
        router_server([full, other, toys[0]], probe_interval_s=60) as (_, url),
    ):
        server.host.state = HostState.DRAINING
        for _ in range(3):
            assert httpx.post(url + "/v1/messages", json=body).status_code == 200


@pytest.mark.slow
def test_a_drain_loses_no_request() -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {**COMPLETION, "prompt": f"request {number}", "stream": number % 2 == 0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if number % 2:
            return text_of(answer)
        assert answer.text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def main(url: str, drain: Callable[[], None]) -> list[str]:
        limits = httpx.Limits(max_connections=20)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            tasks = [asyncio.ensure_future(ask(client, number)) for number in range(200)]
            while sum(task.done() for task in tasks) < 60:
                await asyncio.sleep(0.002)
            drain()
            return await asyncio.gather(*tasks)

    limits = {"max_num_waiting": 1000}
    with (
        toy_server(limits=limits) as (first, one),
        toy_server(limits=limits) as (_, two),
        router_server([one, two]) as (_, url),
    ):
        drained = asyncio.run(main(url, first.host.begin_drain))
        first.host.state = HostState.READY
        assert drained == asyncio.run(main(url, lambda: None))


def test_the_router_drains(toys: list[str]) -> None:
    with router_server(toys) as (host, url):
        host.begin_drain()
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/ready").json()["reason"] == "draining"
        answer = httpx.post(url + "/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert answer.headers["connection"] == "close"


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """Meanwhile the replica has to wait: nobody collects the stream."""
    with (
        FakeOpenAIServer(pieces=("x" * 100_000,) * 1000) as fake,
        router_server([fake.url], write_timeout_s=0.4) as (host, url),
    ):
        connection = send(url, {"prompt": "a", "stream": True})
        wait_until(lambda: host.replicas[0].num_running == 1)
        wait_until(lambda: host.replicas[0].num_running == 0)
        wait_until(lambda: fake.num_abandoned == 1)
        connection.close()
        assert len(fake.requests) == 1


def test_seeds_and_the_response_cache() -> None:
    """A seed of the router is not for the cache; what was for the cache still is."""
    stream = {**COMPLETION, "stream": True}
    drawn = {**stream, "temperature": 1.0}
    with toy_server(response_cache="memory") as (_, toy), router_server([toy]) as (_, url):

        def ask(body: dict[str, Any], **headers: str) -> tuple[str, str]:
            answer = httpx.post(url + "/v1/completions", json=body, headers=headers)
            texts = [
                json.loads(line[6:])["choices"][0]["text"] for line in answer.text.splitlines() if '"choices"' in line
            ]
            return answer.headers["x-cache"], "".join(texts)

        assert [ask(drawn)[0] for _ in range(2)] == ["bypass", "bypass"]
        assert len({ask({**drawn, "ignore_eos": True})[1] for _ in range(5)}) > 1
        for body in (stream, {**drawn, "seed": 3}):
            first, second = ask(body), ask(body)
            assert (first[0], second[0]) == ("miss", "hit")
            assert first[1] == second[1]
        sampled = {"X-Cache-Sampled": "1"}
        first, second = ask(drawn, **sampled), ask(drawn, **sampled)
        assert (first[0], second[0]) == ("miss", "hit")
        assert first[1] == second[1]


def test_time_limits_go_on_while_a_request_is_routed() -> None:
    headers = ((b"x-request-timeout", b"5"), (b"accept", b"5"))
    request = RoutedRequest("POST", "/", b"", Prompt(), False, headers, begin=time.monotonic() - 2)
    (_, left), other = request.headers()
    assert 2.5 < float(left) <= 3
    assert other == (b"accept", b"5")
    late = RoutedRequest("POST", "/", b"", Prompt(), False, headers, begin=time.monotonic() - 20)
    assert late.headers()[0] == (b"x-request-timeout", b"0.001")
    for wrong in (b"x", b"-1", b"nan"):
        request = RoutedRequest("POST", "/", b"", Prompt(), False, ((b"x-request-timeout", wrong),))
        assert request.headers() == [(b"x-request-timeout", wrong)]
