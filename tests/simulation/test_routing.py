"""The rules of the router."""

import pytest

from fastinfer.simulation.routing import LeastLoaded, PrefixAffinity, RoundRobin, Routing
from fastinfer.simulation.trace import TraceRequest

PLAIN = TraceRequest(0.0, 100, 1)


def shared(name: str, prompt_tokens: int = 100, prefix_tokens: int = 80) -> TraceRequest:
    return TraceRequest(0.0, prompt_tokens, 1, name, prefix_tokens)


def quiet(routing: Routing, request: TraceRequest) -> int:
    """Send a request that ends before the next one comes."""
    replica, load = routing.send(request)
    routing.finish(replica, load)
    return replica


def test_round_robin_takes_turns() -> None:
    routing = RoundRobin(3)
    assert [routing.send(PLAIN)[0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_prefers_the_idle_and_takes_turns_among_equals() -> None:
    routing = LeastLoaded(3)
    routing.loads[:] = (2, 0, 1)
    assert [routing.send(PLAIN)[0] for _ in range(3)] == [1, 2, 1]
    routing.loads[:] = 0
    assert sorted(quiet(routing, PLAIN) for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    assert not routing.loads.any()


def test_affinity_follows_the_prefix_until_the_load_outweighs_it() -> None:
    routing = PrefixAffinity(4, beta=1.0)
    home = quiet(routing, shared("a"))
    assert quiet(routing, shared("a")) == home
    # 80 of 100 tokens match. The loads differ by 9 at a mean of 12.25, which is 0.73, or by 11 at 12.75, which is 0.86.
    routing.loads[:] = 10
    routing.loads[home] = 19
    assert quiet(routing, shared("a")) == home
    routing.loads[home] = 21
    assert quiet(routing, shared("a")) != home


def test_affinity_weighs_what_must_be_computed() -> None:
    routing = PrefixAffinity(2, beta=0.0)
    assert routing.send(shared("a", 3072, 2048)) == (0, 4.0)
    assert routing.send(shared("a", 3072, 2048)) == (0, 2.0)
    assert routing.send(PLAIN)[1] == 1 + 100 / 1024
    assert routing.loads.sum() == 4 + 2 + 1 + 100 / 1024
    assert routing.send(shared("a", 2048, 1024))[1] == 1 + 1
    assert routing.send(shared("a", 3072, 2048))[1] == 2.0, "the shorter prefix has not replaced the longer one"


def test_affinity_goes_to_the_longest_match() -> None:
    routing = PrefixAffinity(2, beta=0.0)
    assert quiet(routing, shared("a", prefix_tokens=40)) == 0
    assert quiet(routing, PLAIN) == 1
    routing.loads[:] = 5
    assert quiet(routing, shared("a", prefix_tokens=80)) == 0
    assert quiet(routing, shared("b", prefix_tokens=80)) == 1


def test_misses_are_spread_at_low_load() -> None:
    routing = PrefixAffinity(4, beta=1.0)
    assert sorted(quiet(routing, shared(f"name-{number}")) for number in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_one_hot_prefix_does_not_take_the_affinity_of_others(beta: float) -> None:
    routing = PrefixAffinity(4, beta)
    for _ in range(40):
        routing.send(shared("hot"))
    homes = {name: routing.send(shared(name))[0] for name in ("x", "y", "z")}
    assert {name: quiet(routing, shared(name)) for name in homes} == homes
