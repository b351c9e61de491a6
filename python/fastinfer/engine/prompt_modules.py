"""Prompts that stay in the cache under a name, for others to begin with."""

from collections.abc import Iterable

from fastinfer.engine.kv_cache import KVCache
from fastinfer.engine.kv_tensors import num_blocks_for
from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError


class PromptModules:
    """Names of pinned sequences. Their blocks are held like a running sequence's, and found by the prefix cache.

    Args:
        kv_cache: where they are.
        max_model_len: a sequence of so many tokens must always find room beside them.
    """

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._sequences: dict[str, Sequence] = {}

    def add(self, name: str, sequence: Sequence) -> None:
        """Pin a sequence that is going to be computed."""
        cache = self._kv_cache
        if not cache.enable_prefix_caching:
            raise RequestError("prompt modules need enable_prefix_caching=True, got False")
        if name in self._sequences:
            raise RequestError(f"name must be new, got {name!r}, which is a prompt module already")
        lengths = [self._max_model_len, *map(len, self._sequences.values())]
        room = cache.num_blocks - sum(num_blocks_for(length, cache.block_size) for length in lengths)
        needed = num_blocks_for(len(sequence), cache.block_size)
        if needed > room:
            raise RequestError(f"prompt module must fit into {room} more blocks of the KV cache, got {needed} blocks")
        self._sequences[name] = sequence

    def get(self, name: str) -> Sequence:
        if name not in self._sequences:
            raise RequestError(f"prompt module must be one of {sorted(self._sequences)}, got {name!r}")
        return self._sequences[name]

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._sequences.values()

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Unpin; who computes or holds the blocks then is the caller's business."""
        gone = set(sequences)
        self._sequences = {name: s for name, s in self._sequences.items() if s not in gone}
