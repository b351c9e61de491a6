"""Rules by which a router chooses the replica of a request."""

from abc import ABC, abstractmethod
from collections import defaultdict

import numpy as np

from fastinfer.simulation.trace import TraceRequest

ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")


class Routing(ABC):
    """Chooses replicas.

    Args:
        num_replicas: number of replicas.

    Attributes:
        loads: for each replica the number of requests that it was sent and that have not ended; kept up to date by the
            caller.
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = np.zeros(num_replicas, dtype=np.int64)
        self._next = 0

    @abstractmethod
    def choose(self, request: TraceRequest) -> int:
        """Return the number of the replica that gets a request."""

    def _best(self, scores: np.ndarray) -> int:
        """Return the replica with the highest score; equal ones take turns, so that none gets all of a quiet time."""
        best = np.flatnonzero(scores == scores.max())
        chosen = int(best[np.searchsorted(best, self._next) % len(best)])
        self._next = (chosen + 1) % len(self.loads)
        return chosen


class RoundRobin(Routing):
    """Sends requests to all replicas in turn."""

    def choose(self, request: TraceRequest) -> int:
        chosen, self._next = self._next, (self._next + 1) % len(self.loads)
        return chosen


class LeastLoaded(Routing):
    """Sends a request to a replica with the fewest unfinished requests."""

    def choose(self, request: TraceRequest) -> int:
        return self._best(-self.loads)


class PrefixAffinity(Routing):
    """Weighs the part of the prompt that a replica has computed before against its load.

    The score is ``matched / prompt - beta * (load - mean) / max(1, mean)``, as in vLLM's production stack. The router
    knows which prefixes it has sent where, not which blocks a replica has evicted since.

    Args:
        num_replicas: number of replicas.
        beta: weight of the load; 0 for affinity alone.
    """

    def __init__(self, num_replicas: int, beta: float) -> None:
        super().__init__(num_replicas)
        self._beta = beta
        self._sent: dict[str, dict[int, int]] = defaultdict(dict)  # by prefix: tokens that each replica has of it

    def choose(self, request: TraceRequest) -> int:
        mean = self.loads.mean()
        scores = -self._beta * (self.loads - mean) / max(1.0, mean)
        if request.prefix is None:
            return self._best(scores)
        sent = self._sent[request.prefix]
        for replica, num_tokens in sent.items():
            scores[replica] += min(num_tokens, request.prefix_tokens) / request.prompt_tokens
        chosen = self._best(scores)
        sent[chosen] = max(sent.get(chosen, 0), request.prefix_tokens)
        return chosen


def make_routing(name: str, num_replicas: int, beta: float) -> Routing:
    """Make the routing of this name, one of ``ROUTINGS``; only ``prefix-affinity`` has a ``beta``."""
    if name == "prefix-affinity":
        return PrefixAffinity(num_replicas, beta)
    return LeastLoaded(num_replicas) if name == "least-loaded" else RoundRobin(num_replicas)
