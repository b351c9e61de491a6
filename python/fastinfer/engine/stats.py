"""What an engine tells of its load."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """A moment's load, and counts since the start.

    Attributes:
        num_running, num_waiting: sequences.
        num_free_blocks, num_cached_blocks, num_used_blocks: of the KV cache: empty; holding prefixes that nobody uses
            now; held by sequences and prompt modules.
        num_preemptions: since the start.
        num_queried_tokens, num_hit_tokens: tokens of admitted sequences, and how many of them the prefix cache had.
        kv_fragmentation: share of the slots in running sequences' blocks that hold no token.
        num_drafted_tokens, num_accepted_tokens: of speculation.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_preemptions: int
    num_queried_tokens: int
    num_hit_tokens: int
    kv_fragmentation: float
    num_drafted_tokens: int
    num_accepted_tokens: int

    @property
    def prefix_hit_rate(self) -> float:
        """0 to 1; 0 before the first request."""
        return self.num_hit_tokens / max(self.num_queried_tokens, 1)
