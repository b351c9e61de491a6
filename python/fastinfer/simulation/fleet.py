"""Simulation of a trace on one or more replicas behind a router."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fastinfer.simulation.cost_file import CostFile
from fastinfer.simulation.replica import Record, Replica
from fastinfer.simulation.routing import Routing
from fastinfer.simulation.trace import TraceRequest, check_length


class VirtualClock:
    """A clock that the simulation sets.

    Attributes:
        now: time in seconds after the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Simulation:
    """A trace that was simulated.

    Attributes:
        records: what happened to each request, in the order of arrival.
        replicas: the replicas at the end.
        seconds: time from the first arrival to the end of the last request.
    """

    records: list[Record]
    replicas: list[Replica]
    seconds: float


def simulate(trace: Sequence[TraceRequest], costs: CostFile, routing: Routing) -> Simulation:
    """Run a trace to its end in simulated time.

    Events are handled in the order of their times: the ends of steps, then arrivals, then the beginnings of steps. So a
    step sees all requests that have arrived by its beginning. The result depends on the arguments alone.

    Args:
        trace: the requests, in any order.
        costs: limits of the engines and time of their steps.
        routing: rule by which a replica is chosen; it has one load per replica, and has sent nothing yet.

    Raises:
        RequestError: a request does not fit into an engine, or its longest sequence not into its KV cache.
    """
    for request in trace:
        check_length(request, costs.limits.max_model_len)
    clock = VirtualClock()
    replicas = [Replica(costs, clock) for _ in routing.loads]
    prefixes = _prefixes(trace)
    arrivals = deque(sorted(trace, key=lambda request: request.arrival_s))
    first = arrivals[0].arrival_s if arrivals else 0.0
    records: list[Record] = []
    ends: list[tuple[float, int]] = []  # of the steps that are being computed
    while arrivals or ends:
        clock.now = now = min(ends[0][0] if ends else math.inf, arrivals[0].arrival_s if arrivals else math.inf)
        woken: dict[int, None] = {}
        while ends and ends[0][0] <= now:
            index = heapq.heappop(ends)[1]
            for ended in replicas[index].end_step():
                routing.finish(index, ended.load)
            woken[index] = None
        while arrivals and arrivals[0].arrival_s <= now:
            request = arrivals.popleft()
            index, load = routing.send(request)
            prefix = [] if request.prefix is None else prefixes[request.prefix]
            records.append(Record(request, index, load))
            replicas[index].add(records[-1], len(records), prefix)
            if not replicas[index].is_busy:
                woken[index] = None
        for index in woken:
            seconds = replicas[index].begin_step()
            if seconds is not None:
                heapq.heappush(ends, (now + seconds, index))
    return Simulation(records, replicas, clock.now - first)


def _prefixes(trace: Sequence[TraceRequest]) -> dict[str, list[int]]:
    """Return the tokens of each prefix, as many as the longest one of its name has."""
    lengths: dict[str, int] = {}
    for request in trace:
        if request.prefix is not None:
            lengths[request.prefix] = max(lengths.get(request.prefix, 0), request.prefix_tokens)
    # Only the first token differs, as everything after it is found by the hash of all tokens before.
    return {name: [number + 1] + [0] * (lengths[name] - 1) for number, name in enumerate(lengths)}
