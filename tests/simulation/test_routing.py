"""The rules of the router."""

import pytest

from fastinfer.simulation.routing import LeastLoaded, PrefixAffinity, RoundRobin, Routing
from fastinfer.simulation.trace import TraceRequest

PLAIN = TraceRequest(0.0, 100, 1)


def shared(name: str, prompt_tokens: int = 100, prefix_tokens: int = 80) -> TraceRequest:
    return TraceRequest(0.0, prompt_tokens, 1, name, prefix_tokens)


def send(routing: Routing, request: TraceRequest) -> int:
    chosen = routing.choose(request)
    routing.loads[chosen] += 1
    return chosen


def test_round_robin_takes_turns() -> None:
    routing = RoundRobin(3)
    assert [send(routing, PLAIN) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_prefers_the_idle_and_takes_turns_among_equals() -> None:
    routing = LeastLoaded(3)
    routing.loads[:] = (2, 0, 1)
    assert [send(routing, PLAIN) for _ in range(2)] == [1, 2]
    routing.loads[:] = 0
    quiet = []
    for _ in range(6):  # each request ends before the next one comes
        quiet.append(routing.choose(PLAIN))
    assert sorted(quiet) == [0, 0, 1, 1, 2, 2]


def test_affinity_follows_the_prefix_until_the_load_outweighs_it() -> None:
    routing = PrefixAffinity(4, beta=1.0)
    home = routing.choose(shared("a"))
    assert routing.choose(shared("a")) == home
    # 80 of 100 tokens match. The loads differ by 9 at a mean of 12.25, which is 0.73, or by 11 at 12.75, which is 0.86.
    routing.loads[:] = 10
    routing.loads[home] = 19
    assert routing.choose(shared("a")) == home
    routing.loads[home] = 21
    assert routing.choose(shared("a")) != home


def test_affinity_without_load_goes_to_the_longest_match() -> None:
    routing = PrefixAffinity(2, beta=0.0)
    routing._sent["a"] = {0: 40, 1: 60}
    assert routing.choose(shared("a")) == 1
    assert routing.choose(shared("a", prefix_tokens=30)) in (0, 1)  # both have all of it


def test_misses_are_spread_at_low_load() -> None:
    routing = PrefixAffinity(4, beta=1.0)
    assert sorted(routing.choose(shared(f"name-{number}")) for number in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_one_hot_prefix_does_not_take_the_affinity_of_others(beta: float) -> None:
    routing = PrefixAffinity(4, beta)
    for _ in range(40):
        send(routing, shared("hot"))
    homes = {name: send(routing, shared(name)) for name in ("x", "y", "z")}
    assert all(routing.choose(shared(name)) == home for name, home in homes.items())
