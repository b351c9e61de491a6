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
        replica_wait_s: seconds for which a request that has lost its replica waits for another one.
        write_timeout_s: as in :class:`HttpConfig`, and less than the replicas' own limit, so that the router notices a
            slow client before they do.
    """

    beta: float = 1.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    max_index_blocks: int = 1 << 16
    max_lost: int = 2
    replica_wait_s: float = 30.0
    write_timeout_s: float = 30.0
