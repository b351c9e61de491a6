"""Prompts that stay in the cache under a name, for others to begin with."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError
from fastinfer.models.kv_cache import num_blocks_for


@dataclass(frozen=True, slots=True)
class PromptModule:
    """A pinned prompt.

    Attributes:
        sequence: which holds its blocks.
        cache_salt: under which others find them.
    """

    sequence: Sequence
    cache_salt: str

    @property
    def token_ids(self) -> list[int]:
        return list(self.sequence.token_ids)


class PromptModules:
    """Names of pinned sequences. Their blocks are held like a running sequence's, and found by the prefix cache.

    Args:
        block_manager: holds their blocks.
        max_model_len: a sequence of so many tokens must always find room beside them.
    """

    def __init__(self, block_manager: BlockManager, max_model_len: int) -> None:
        self._block_manager = block_manager
        self._max_model_len = max_model_len
        self._modules: dict[str, PromptModule] = {}

    def add(self, name: str, module: PromptModule) -> None:
        """Pin one that is going to be computed."""
        cache = self._block_manager
        if not cache.enable_prefix_caching:
            raise RequestError("prompt modules need enable_prefix_caching=True, got False")
        if name in self._modules:
            raise RequestError(f"name must be new, got {name!r}, which is a prompt module already")
        lengths = [self._max_model_len, *map(len, self.sequences)]
        room = cache.num_blocks - sum(num_blocks_for(length, cache.block_size) for length in lengths)
        needed = num_blocks_for(len(module.sequence), cache.block_size)
        if needed > room:
            raise RequestError(f"prompt module must fit into {room} more blocks of the KV cache, got {needed} blocks")
        self._modules[name] = module

    def get(self, name: str) -> PromptModule:
        if name not in self._modules:
            raise RequestError(f"prompt module must be one of {sorted(self._modules)}, got {name!r}")
        return self._modules[name]

    @property
    def sequences(self) -> list[Sequence]:
        return [module.sequence for module in self._modules.values()]

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self.sequences

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Unpin; who computes or holds the blocks then is the caller's business."""
        gone = set(sequences)
        self._modules = {name: module for name, module in self._modules.items() if module.sequence not in gone}
