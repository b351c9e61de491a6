"""The router's policy as a request router of Ray Serve."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from fastinfer.server.router.policy import choose
from fastinfer.server.router.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


@dataclass
class _Engine:
    """The part of a replica that decides about its score.

    Attributes:
        load: number of its requests.
        last_chosen: number that grows with each choice of any replica.
        prefixes: prefixes that it has computed.
    """

    prefixes: PrefixIndex
    load: float = 0.0
    last_chosen: int = 0


class PrefixRouter(RequestRouter):
    """Sends a :class:`~fastinfer.ray_serve.call.Call` to the replica with most of its prompt, see ``policy.choose``.

    Load is Ray's own count of the requests on a replica: those of all gateways, as of the last answer of the replica.
    Each request gets the replica that was chosen for it, not the next one that is free, so this is no ``FIFOMixin``.
    """

    def initialize_state(self, beta: float = 1.0, max_index_blocks: int = 1 << 16) -> None:
        """Take the settings of the deployment, see :class:`~fastinfer.server.router.config.RouterConfig`."""
        self._beta = beta
        self._max_index_blocks = max_index_blocks
        self._engines: dict[Any, _Engine] = {}
        self._numbers = itertools.count(1)

    async def choose_replicas(
        self, candidate_replicas: Sequence["RunningReplica"], pending_request: "PendingRequest | None" = None
    ) -> list[list["RunningReplica"]]:
        """Return the replica with the best score, and all others for the case that it is full."""
        if pending_request is None or not candidate_replicas:
            return []
        # Without this Ray asks again at once as long as all replicas are full.
        pending_request.routing_context.should_backoff = True
        prompt = pending_request.args[0].prompt
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        self._engines = {name: self._engine(name) for name in replicas}
        best = choose(self._engines.values(), prompt, self._beta)
        assert best is not None
        best.last_chosen = next(self._numbers)
        best.prefixes.add(prompt)
        chosen = [replicas[name] for name, engine in self._engines.items() if engine is best]
        return [chosen, [replica for replica in candidate_replicas if replica not in chosen]]

    def _engine(self, name: Any) -> _Engine:
        """Return what is known of a replica; one that has gone is forgotten with its number."""
        engine = self._engines.get(name) or _Engine(PrefixIndex(self._max_index_blocks))
        num_requests = self.replica_queue_len_cache.get(name)
        engine.load = engine.load if num_requests is None else num_requests
        return engine
