"""Choice of the replica that gets a request."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from fastinfer.server.router.prefix_index import PrefixIndex
from fastinfer.server.router.prompts import Prompt


class Candidate(Protocol):
    """The part of a replica that decides about its score, see :class:`~fastinfer.server.router.replica.Replica`."""

    load: float
    last_chosen: int
    prefixes: PrefixIndex


Chosen = TypeVar("Chosen", bound=Candidate)


def choose(replicas: Iterable[Chosen], prompt: Prompt, beta: float) -> Chosen | None:
    """Return the replica with the best score; ``None`` if there are no replicas.

    The score is the part of the prompt that the replica has cached, 0..1, minus ``beta`` times its relative load,
    (load - mean) / max(1, mean). So an idle machine keeps conversations where their prefixes are, and a busy one gives
    up a prefix rather than let others wait. Every replica has a score of its own: one that is overloaded changes
    nothing between the others. Of equal scores, the replica wins that has not been chosen for longest, so that new
    prompts go round even if nothing runs. Source: the router of vLLM's production stack.

    Args:
        replicas: replicas that are ready.
        prompt: the request's prompt.
        beta: weight of the load, without unit.
    """
    candidates = list(replicas)
    if not candidates:
        return None
    mean = sum(replica.load for replica in candidates) / len(candidates)

    def score(replica: Candidate) -> tuple[float, int]:
        matched = replica.prefixes.matched(prompt) / max(prompt.num_bytes, 1)
        return matched - beta * (replica.load - mean) / max(1.0, mean), -replica.last_chosen

    return max(candidates, key=score)
