"""The size of the KV cache, states included, and the longest sequence that the engine accepts."""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.models.kv_cache import num_blocks_for
from fastinfer.utils.host_memory import host_memory

# Share of a CPU's memory beside the weights that a cache of default size may use.
CPU_MEMORY_SHARE = 0.5
# Sequence length in tokens that the default size on a CPU provides for. Few requests use a long context to the end, and
# for those that do, preempting others costs less than the memory.
TYPICAL_TOKENS = 2048
# Share of the cache's memory that the states of layers with linear attention may use.
STATE_SHARE = 0.5
# Number of sequences whose drafts have slots of their own; those of more take the slots of snapshots.
DRAFTING_SEQS = 8
OPTIONS = "max_model_len (--context), kv_cache_dtype (--kv-cache-dtype)"


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Limits that follow from the memory.

    Attributes:
        windows: length of the attention window in each group of layers, in ascending order; 0 for none.
        num_blocks: number of blocks of each group.
        max_model_len: longest sequence in tokens, which fits into the cache.
        num_bytes: size of the cache in bytes, of all models together, states included.
        num_states: number of slots for states, of a model that has layers with linear attention.
    """

    windows: tuple[int, ...]
    num_blocks: tuple[int, ...]
    max_model_len: int
    num_bytes: int
    num_states: int = 0

    def group(self, window: int) -> int:
        """Return the group of a layer with this window."""
        return self.windows.index(window) if window in self.windows else 0


@dataclass(frozen=True)
class Room:
    """Memory for a KV cache beside the weights.

    Attributes:
        free: number of bytes that can be allocated.
        default: number of bytes that a cache of default size may use.
    """

    free: int
    default: int


def available_memory(device: str) -> int:
    """Return the number of bytes that can be allocated on the device without swapping.

    On a CPU the limits of the container in which the process runs count, too.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_memory().available


def room_on(config: EngineConfig, device: str, weight_bytes: int = 0, available: int | None = None) -> Room:
    """Return the room for a cache on a device.

    By default a cache uses half of the available memory that the weights and the store of ``kv_offloading_size`` leave
    on a CPU. On a GPU it uses what ``gpu_memory_utilization`` of the whole memory leaves, so that the rest is there for
    activations.

    Args:
        config: configuration of the engine.
        device: the device.
        weight_bytes: size of the weights that are still to be loaded.
        available: number of bytes that the engine may use, these weights included; ``None`` for what is available on
            the device.

    Raises:
        RequestError: ``kv_offloading_size`` exceeds what the weights leave on a CPU.
    """
    free = max(0, (available_memory(device) if available is None else available) - weight_bytes)
    if (store := _store_bytes(config, device)) > free:
        raise RequestError(
            f"kv_offloading_size must fit into the {free / 2**30:.1f} GiB of memory that are available beside the "
            f"weights, got {config.kv_offloading_size}"
        )
    free -= store
    if torch.device(device).type != "cuda":
        return Room(free, int(free * CPU_MEMORY_SHARE))
    total = torch.cuda.mem_get_info(device)[1]
    return Room(free, max(0, free - int(total * (1 - config.gpu_memory_utilization))))


def choose_kv_cache_size(
    config: EngineConfig,
    model_limit: int,
    token_bytes: Mapping[int, int],
    state_bytes: int = 0,
    room: Room | None = None,
    typical_tokens: int = TYPICAL_TOKENS,
) -> KVCacheSize:
    """Choose the number of blocks of each group of layers, and the longest sequence.

    Without ``max_model_len`` the longest sequence is the model's limit, or what fits into the cache if that is less.

    Args:
        config: configuration of the engine.
        model_limit: longest sequence of the model in tokens.
        token_bytes: for each length of the attention window, 0 for none: bytes of one token's keys and values in all
            layers with this window.
        state_bytes: bytes of one sequence's states in all layers with linear attention.
        room: memory for the cache; ``None`` for what is available on the device, without weights to be loaded.
        typical_tokens: sequence length in tokens that the default size on a CPU provides for.

    Raises:
        RequestError: the cache or ``kv_offloading_size`` does not fit into memory, or ``max_model_len`` does not fit
            into the cache or exceeds the model's limit.
    """
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise RequestError(f"max_model_len must be at most the model's {model_limit}, got {config.max_model_len}")
    wanted = config.max_model_len or model_limit
    sizes = _Sizes(config, token_bytes, wanted, typical_tokens)
    room = room or room_on(config, config.device)
    memory = room.default if config.kv_cache_memory is None else config.kv_cache_memory
    num_states = _num_states(config, state_bytes, memory)
    all_states = num_states * state_bytes
    affordable = sizes.affordable(max(0, memory - all_states))
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = affordable
    else:
        num_blocks = _default_num_blocks(config, sizes, affordable, typical_tokens)
    num_bytes = sizes.num_bytes(num_blocks) + all_states
    if num_bytes > room.free:
        others = "the weights and kv_offloading_size" if _store_bytes(config, config.device) else "the weights"
        raise RequestError(
            f"the KV cache must fit into the {room.free} bytes of memory that are available beside {others}, "
            f"got {num_blocks} blocks and {num_bytes} bytes"
        )
    needed = sizes.needed(config.max_model_len or 1)
    if num_blocks < needed:
        subject = "one block" if config.max_model_len is None else f"max_model_len={config.max_model_len}"
        raise RequestError(
            f"{subject} needs a KV cache of {sizes.num_bytes(needed) + all_states} bytes, got {num_bytes}: "
            f"change {options_for(config)}"
        )
    max_model_len = wanted if num_blocks >= sizes.needed(wanted) else num_blocks * config.block_size
    counts = tuple(sizes.num_blocks(num_blocks))
    return KVCacheSize(tuple(sizes.windows), counts, max_model_len, num_bytes, num_states)


def _store_bytes(config: EngineConfig, device: str) -> int:
    """Return how much of the device's memory the store of ``kv_offloading_size`` takes, in bytes; 0 on a GPU."""
    return 0 if torch.device(device).type == "cuda" else int((config.kv_offloading_size or 0.0) * 2**30)


class _Sizes:
    """The sizes of a KV cache by the number of blocks of its first group, which is the one without a window if any is.

    Args:
        config: configuration of the engine.
        token_bytes: bytes of one token in each group, by window.
        max_model_len: longest sequence in tokens that is wanted.
        typical_tokens: sequence length in tokens that the default size on a CPU provides for.

    Attributes:
        windows: the windows of all groups, in ascending order.
        max_model_len: see above.
    """

    def __init__(
        self, config: EngineConfig, token_bytes: Mapping[int, int], max_model_len: int, typical_tokens: int
    ) -> None:
        self.windows = sorted(token_bytes)
        self.max_model_len = max_model_len
        self._block_size = config.block_size
        self._block_bytes = [config.block_size * token_bytes[window] for window in self.windows]
        self._num_seqs = config.max_num_seqs
        self._chunk = num_blocks_for(min(config.max_num_batched_tokens, max_model_len), config.block_size)
        # As many sequences of this length as the first group holds have room in the other groups too.
        typical = min(max(typical_tokens, 2 * self.windows[-1]), max_model_len)
        self._typical = num_blocks_for(typical, config.block_size)

    def num_blocks(self, first: int) -> list[int]:
        """Return the number of blocks of each group if the first one has this many."""
        num_seqs = max(1, min(self._num_seqs, first // self._typical))
        others = [num_seqs * self._needed(window) + self._chunk for window in self.windows[1:]]
        return [first, *(min(first, count) for count in others)]

    def num_bytes(self, first: int) -> int:
        """Return the size of all groups in bytes if the first one has this many blocks."""
        return sum(count * size for count, size in zip(self.num_blocks(first), self._block_bytes, strict=True))

    def affordable(self, memory: int) -> int:
        """Return the largest number of blocks of the first group with which all fit into this many bytes.

        If the longest sequence does not fit, the other groups get room for fewer sequences.
        """
        counts = range(memory // self._block_bytes[0] + 1)
        while True:
            first = bisect.bisect_right(counts, memory, key=self.num_bytes) - 1
            if first >= self.needed(self.max_model_len) or self._num_seqs == 1:
                return first
            self._num_seqs = max(1, min(self._num_seqs, first // self._typical) // 2)

    def needed(self, num_tokens: int) -> int:
        """Return how many blocks of the first group a sequence of this length needs in order to run alone."""
        num_blocks, window = num_blocks_for(num_tokens, self._block_size), self.windows[0]
        return min(num_blocks, self._needed(window)) if window else num_blocks

    def comfortable(self, num_tokens: int) -> int:
        """Return how many blocks of the first group sequences of this length need beside a whole step of prompts."""
        num_blocks = num_blocks_for(num_tokens, self._block_size)
        return min(num_blocks, self.needed(num_tokens) + self._chunk)

    def _needed(self, window: int) -> int:
        """Return how many blocks hold the positions that a token sees, and the token's own."""
        return num_blocks_for(window, self._block_size) + 1


def _num_states(config: EngineConfig, state_bytes: int, memory: int) -> int:
    """Return the number of slots for states: at most a share of the memory, but one in any case.

    Every sequence can have one, and a snapshot if prefixes are cached.
    """
    if not state_bytes:
        return 0
    drafts = config.num_speculative_tokens * min(config.max_num_seqs, DRAFTING_SEQS)
    wanted = config.max_num_seqs * (1 + config.enable_prefix_caching) + drafts
    return max(1, min(wanted, int(memory * STATE_SHARE) // state_bytes))


def options_for(config: EngineConfig) -> str:
    """Return the names of the options that change how long a sequence fits, for messages."""
    memory = "gpu_memory_utilization" if torch.device(config.device).type == "cuda" else "kv_cache_memory"
    return f"{OPTIONS} or {memory}"


def options_for_memory(config: EngineConfig) -> str:
    """Return the names of the options that change how much memory an engine takes, for messages."""
    return f"max_num_seqs (--max-num-seqs), max_num_batched_tokens, max_loras, {options_for(config)}"


def _default_num_blocks(config: EngineConfig, sizes: _Sizes, affordable: int, typical_tokens: int) -> int:
    """Return the number of blocks of the first group that no option sets.

    On a GPU this is all that the memory affords, on a CPU enough for sequences of typical length or for a long one.
    """
    if torch.device(config.device).type == "cuda":
        return affordable
    usual = config.max_num_seqs * sizes.comfortable(min(sizes.max_model_len, typical_tokens))
    return min(affordable, max(usual, sizes.comfortable(sizes.max_model_len)))
