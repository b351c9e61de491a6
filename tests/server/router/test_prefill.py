"""Long prompts that another server computes first: the answers stay the same, whatever that server does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.routers import BreakingProxy, router_server
from support.toy import toy_engine
from support.toy_server import toy_server

from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.stats import EngineStats

LONG = "once upon a time there was a king who had a daughter and two cats"
MIN_BYTES = 55
IDS = [10 + 7 * i % 50 for i in range(60)]  # 180 bytes, of which the router remembers 128
SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 20, "ignore_eos": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": IDS, "n": 2, **SAMPLED}),
    ("/v1/completions", {"prompt": LONG, "min_tokens": 20, **SAMPLED, "temperature": 0}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a " + LONG}], "max_completion_tokens": 20, "temperature": 0},
    ),
    (
        "/v1/messages",
        {"model": "toy", "messages": [{"role": "user", "content": "b " + LONG}], "max_tokens": 20, "temperature": 0},
    ),
    ("/v1/responses", {"input": "c " + LONG, "max_output_tokens": 20, "temperature": 0}),
]


class Servers:
    """A server that computes prompts, one that answers, and one by itself, whose answers are right."""

    def __init__(self, servers: list[tuple[Any, str]]) -> None:
        self._servers = servers
        self.prefill_url, self.url, self.right_url = (url for _, url in servers)

    def stats(self, index: int) -> EngineStats:
        stats: EngineStats = self._servers[index][0].host.loaded.stats()
        return stats


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    # At once, so that the other server finds the last blocks, too.
    monkeypatch.setattr(DiskBlockStore, "put", DiskBlockStore._write)

    def engine() -> Any:
        return toy_engine(kv_offloading_dir=tmp_path, num_kv_blocks=200, block_size=4)

    with toy_server(engine=engine) as first, toy_server(engine=engine) as second, toy_server() as third:
        yield Servers([first, second, third])


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer of a server, apart from ids and times."""
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"[a-z]+_?[0-9a-f-]{16,}"|"(created|created_at|completed_at)":[0-9.]+', "", answer.text)
    return re.sub(r'"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+', "", text)


def prefills(url: str) -> dict[str, int]:
    """How many prompts a prefill server was to compute, by status."""
    pattern = re.compile(r'fastinfer_router_prefills_total{server="[^"]*",status="([^"]*)"} (\d+)')
    return {status: int(count) for status, count in pattern.findall(httpx.get(url + "/metrics").text)}


def test_the_answers_stay_the_same(servers: Servers) -> None:
    with router_server([servers.url], [servers.prefill_url], min_prefill_bytes=MIN_BYTES) as (_, url):
        for number, (path, body) in enumerate(BODIES, 1):
            loaded = servers.stats(1).num_loaded_disk_blocks
            assert ask(url, path, body) == ask(servers.right_url, path, body), path
            assert prefills(url) == {"200": number}, path
            assert servers.stats(1).num_loaded_disk_blocks - loaded >= 7, path
        assert servers.stats(0).num_loaded_disk_blocks == 0
        for prompt in ("a king", IDS):  # a short one, and one that is cached
            body = {**SAMPLED, "prompt": prompt}
            assert ask(url, "/v1/completions", body) == ask(servers.right_url, "/v1/completions", body)
        assert httpx.post(url + "/tokenize", json={"prompt": LONG}).status_code == 200
        assert prefills(url) == {"200": len(BODIES)}


def test_a_prefill_server_that_fails_costs_time_alone(servers: Servers) -> None:
    path, body = BODIES[0]
    expected = ask(servers.right_url, path, body)
    with BreakingProxy(servers.prefill_url) as proxy:
        settings = {"min_prefill_bytes": MIN_BYTES, "prefill_timeout_s": 0.3}
        with router_server([servers.url], [proxy.url], **settings) as (host, url):
            proxy.break_after, proxy.breaks_again = 20, True
            assert ask(url, path, body) == expected
            assert prefills(url) == {"error": 1}
            while not host.prefill_servers[0].is_ready:
                pass
            proxy.is_silent = True
            assert ask(url, path, body | {"cache_salt": "of a prompt that nobody has seen"}) == expected
            assert prefills(url) == {"error": 1, "timeout": 1}
            proxy.set_down(True)
            host.prefill_servers[0].set_unready("down")
            assert ask(url, path, body | {"cache_salt": "again"}) == expected
            assert sum(prefills(url).values()) == 2
            assert httpx.get(url + "/ready").status_code == 200


def test_what_a_prefill_server_refuses_is_answered(servers: Servers) -> None:
    with (
        toy_server(names=("other",)) as (_, other),
        router_server([servers.url], [other], min_prefill_bytes=MIN_BYTES) as (_, url),
    ):
        body = {**BODIES[0][1], "model": "toy"}
        assert ask(url, "/v1/completions", body) == ask(servers.right_url, "/v1/completions", body)
        assert prefills(url) == {"404": 1}
