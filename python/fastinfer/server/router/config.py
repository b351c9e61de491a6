"""Settings of the router."""

from dataclasses import dataclass

from fastinfer.server.config import HttpConfig


@dataclass(frozen=True)
class RouterConfig(HttpConfig):
    """Settings of the router, beside those of its HTTP server.

    Attributes:
        beta: what load weighs against a cached prefix, see :func:`~fastinfer.server.router.policy.choose`.
        probe_interval_s: seconds between two questions whether a replica is ready.
        probe_timeout_s: seconds in which it must answer.
        max_index_blocks: blocks of prompts that are remembered per replica, 128 bytes of text and about 100 bytes of
            memory each.
        max_lost: number of replicas that may die with a request before it ends with an error. It bounds how many a
            request can kill that is the reason.
        min_prefill_bytes: bytes of a prompt that must not be cached where the request is answered, for a prefill server
            to compute it first.
        prefill_timeout_s: seconds that it may take, from the request to the end of its answer.
        replica_wait_s: seconds for which a request that has lost its replica waits for another one.
        write_timeout_s: as in :class:`HttpConfig`, and less than the replicas' own limit, so that the router notices a
            slow client before they do.
    """

    beta: float = 1.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    max_index_blocks: int = 1 << 16
    max_lost: int = 2
    min_prefill_bytes: int = 8192
    prefill_timeout_s: float = 30.0
    replica_wait_s: float = 30.0
    write_timeout_s: float = 30.0
