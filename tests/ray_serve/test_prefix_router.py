"""The router's policy inside Ray Serve, with replicas that are names."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastinfer.ray_serve.call import Call
from fastinfer.server.router.prompts import find_prompt

pytest.importorskip("ray.serve", reason="make ray installs it")

from fastinfer.ray_serve.prefix_router import PrefixRouter


class Routing:
    """A router between replicas, and the state of the last request."""

    def __init__(self, **settings: Any) -> None:
        deployment = SimpleNamespace(name="Engine", app_name="app")
        self.router = PrefixRouter(deployment, SimpleNamespace(value="REPLICA"), use_replica_queue_len_cache=True)
        self.router.initialize_state(**settings)
        self.context = SimpleNamespace(should_backoff=False)

    def ranks(self, text: str, names: str) -> list[str]:
        replicas = [SimpleNamespace(replica_id=name) for name in names]
        call = Call("POST", "/v1/completions", (), b"", find_prompt({"prompt": text}, b""))
        self.context = SimpleNamespace(should_backoff=False)
        pending = SimpleNamespace(args=[call], routing_context=self.context)
        ranks = asyncio.run(self.router.choose_replicas(replicas, pending))
        return ["".join(replica.replica_id for replica in rank) for rank in ranks]


def test_new_prompts_go_round_and_known_ones_stay() -> None:
    routing = Routing()
    texts = [f"{number} " * 500 for number in range(3)]
    chosen = [routing.ranks(text, "abc")[0] for text in texts]
    assert sorted(chosen) == ["a", "b", "c"]
    assert [routing.ranks(text, "abc")[0] for text in reversed(texts)] == chosen[::-1]
    assert routing.ranks(texts[0] + "and then", "abc")[0] == chosen[0]


def test_the_others_follow_for_a_replica_that_is_full() -> None:
    routing = Routing()
    assert routing.ranks("x" * 1000, "abc") == ["a", "bc"]
    assert routing.context.should_backoff


def test_load_is_rays_count_of_requests() -> None:
    routing = Routing()
    assert routing.ranks("x" * 1000, "ab")[0] == "a"
    routing.router.replica_queue_len_cache.update("a", 8)
    routing.router.replica_queue_len_cache.update("b", 1)
    assert routing.ranks("x" * 1000, "ab")[0] == "b"
    patient = Routing(beta=0.1)
    assert patient.ranks("x" * 1000, "ab")[0] == "a"
    patient.router.replica_queue_len_cache.update("a", 8)
    patient.router.replica_queue_len_cache.update("b", 1)
    assert patient.ranks("x" * 1000, "ab")[0] == "a"


def test_replicas_come_and_go() -> None:
    routing = Routing()
    assert routing.ranks("x" * 1000, "a") == ["a", ""]
    assert routing.ranks("x" * 1000, "bc") == ["b", "c"]
    assert routing.ranks("x" * 1000, "ab")[0] == "b", "a second replica of the same name knows nothing"
    assert routing.ranks("x", "") == []
