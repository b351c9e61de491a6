"""Rules by which a router chooses the replica of a request."""

from abc import ABC, abstractmethod
from collections import defaultdict

import numpy as np

from fastinfer.simulation.trace import TraceRequest

ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")
# Tokens of a prompt that weigh as much as a request that computes none; 4 KiB of text.
TOKENS_OF_LOAD = 1024


class Routing(ABC):
    """Chooses replicas.

    Args:
        num_replicas: number of replicas.

    Attributes:
        loads: for each replica the sum of the loads of its unfinished requests.
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = np.zeros(num_replicas)
        self._last_chosen = np.full(num_replicas, -1)
        self._num_chosen = 0

    def send(self, request: TraceRequest) -> tuple[int, float]:
        """Choose the replica that gets a request, and add the request to its load.

        Returns:
            The number of the replica, and the load to take back by :meth:`finish`.
        """
        replica = self._choose(request)
        load = self._load_of(request, replica)
        self.loads[replica] += load
        self._last_chosen[replica] = self._num_chosen
        self._num_chosen += 1
        return replica, load

    def finish(self, replica: int, load: float) -> None:
        """Take the load of a request that has ended from its replica."""
        self.loads[replica] -= load

    @abstractmethod
    def _choose(self, request: TraceRequest) -> int:
        """Return the number of the replica that gets a request."""

    def _load_of(self, request: TraceRequest, replica: int) -> float:
        """Return the load of a request that a replica gets."""
        return 1.0

    def _best(self, scores: np.ndarray) -> int:
        """Return the replica with the highest score; of equal ones that which was not chosen for longest."""
        best = np.flatnonzero(scores == scores.max())
        return int(best[self._last_chosen[best].argmin()])


class RoundRobin(Routing):
    """Sends requests to all replicas in turn."""

    def _choose(self, request: TraceRequest) -> int:
        return self._num_chosen % len(self.loads)


class LeastLoaded(Routing):
    """Sends a request to a replica with the fewest unfinished requests."""

    def _choose(self, request: TraceRequest) -> int:
        return self._best(-self.loads)


class PrefixAffinity(Routing):
    """Weighs the part of the prompt that a replica has computed before against its load.

    The score is ``matched / prompt - beta * (load - mean) / max(1, mean)``, as in vLLM's production stack. A request's
    load is 1, and 1 more for each ``TOKENS_OF_LOAD`` tokens of its prompt that do not match. The router knows which
    prefixes it has sent where, not which blocks a replica has evicted since.

    Args:
        num_replicas: number of replicas.
        beta: weight of the load; 0 for affinity alone.
    """

    def __init__(self, num_replicas: int, beta: float) -> None:
        super().__init__(num_replicas)
        self._beta = beta
        self._sent: dict[str, dict[int, int]] = defaultdict(dict)  # by prefix: tokens of it that each replica has

    def _choose(self, request: TraceRequest) -> int:
        mean = self.loads.mean()
        scores = -self._beta * (self.loads - mean) / max(1.0, mean)
        if request.prefix is not None:
            for replica in self._sent[request.prefix]:
                scores[replica] += self._matched(request, replica) / request.prompt_tokens
        return self._best(scores)

    def _load_of(self, request: TraceRequest, replica: int) -> float:
        matched = self._matched(request, replica)
        if request.prefix is not None:
            sent = self._sent[request.prefix]
            sent[replica] = max(sent.get(replica, 0), request.prefix_tokens)
        return 1.0 + (request.prompt_tokens - matched) / TOKENS_OF_LOAD

    def _matched(self, request: TraceRequest, replica: int) -> int:
        """Return how many tokens of a request's prompt a replica has got before."""
        if request.prefix is None:
            return 0
        return min(self._sent[request.prefix].get(replica, 0), request.prefix_tokens)


def make_routing(name: str, num_replicas: int, beta: float | None) -> Routing:
    """Make the routing of this name, one of ``ROUTINGS``; only ``prefix-affinity`` has a ``beta``."""
    if name == "prefix-affinity":
        assert beta is not None
        return PrefixAffinity(num_replicas, beta)
    return LeastLoaded(num_replicas) if name == "least-loaded" else RoundRobin(num_replicas)
