"""Hashes of token prefixes: the keys under which the prefix cache finds full blocks.

The hashes form a chain. The key of a block is the hash of the previous block's key and of the block's own tokens, so it
stands for all tokens from the beginning of the sequence to the end of the block. The chain begins with a hash of the
salt and the adapter: sequences share blocks only if both are the same. vLLM works in the same way
(https://docs.vllm.ai/en/latest/design/prefix_caching.html).
"""

import hashlib
from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Identity of a full, computed block.

    Attributes:
        key: hash of all tokens up to the end of the block.
        tokens: the block's own tokens as bytes; a lookup compares them, so that a hash collision does no harm.
    """

    key: bytes
    tokens: bytes


@dataclass(slots=True)
class PrefixScan:
    """Record of a waiting sequence's prefix, with a bound of the blocks that it could share with running ones.

    Attributes:
        num_acquired: the pool's count of acquired blocks at the beginning of the scan.
        num_published: for each pool of blocks or slots, its count of published contents at the last look.
        num_used: how many of the first 1, 2, ... blocks that were found in the prefix cache running sequences held.
        indices: index of each of these blocks by its key.
        num_hits: number of blocks of the prefix that count as computed, at most.
        num_recomputed: blocks of the prefix that were evicted and then computed again since they were found.
    """

    num_acquired: int
    num_published: list[int]
    num_used: list[int] = field(default_factory=list)
    indices: dict[bytes, int] = field(default_factory=dict)
    num_hits: int = 0
    num_recomputed: int = 0


def first_key(cache_salt: str, adapter_digest: str) -> bytes:
    """Return the key with which a chain begins, before any token.

    Args:
        cache_salt: name of the group of requests that may share prefixes.
        adapter_digest: hash of the updates of the LoRA adapter; empty for none.
    """
    return hashlib.sha256(repr((cache_salt, adapter_digest)).encode()).digest()


def next_key(previous_key: bytes, tokens: bytes) -> bytes:
    """Return the key of a block from the previous block's key and the block's own tokens."""
    return hashlib.sha256(previous_key + tokens).digest()


def tokens_to_bytes(token_ids: list[int]) -> bytes:
    """Return token ids as int64 values in native byte order, which is what is hashed and compared."""
    return array("q", token_ids).tobytes()
