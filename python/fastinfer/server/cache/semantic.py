"""Semantic cache, off by default: answers to questions that mean almost the same.

Similarity of embeddings is no proof of equal meaning: "is it safe" and "is it not safe" are close to each other.
Measure the precision on your own questions before you switch it on.
"""

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastinfer.server.cache.store import StoreStats

LOG = logging.getLogger("fastinfer.server")

MIN_THRESHOLD = 0.8
Vector = NDArray[np.float32]
Embed = Callable[[str], Awaitable[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class SemanticEntry:
    """An answer, the unit vector of its question, [dim] fp32, and the time from which it is too old."""

    vector: Vector
    value: bytes
    expiry: float


class SemanticCache:
    """Finds the answer to the most similar question of the same scope.

    A scope is the :func:`fastinfer.server.cache.key.cache_key` of the request without its last user text: tenant,
    model, earlier messages and all parameters must be equal. It is looked up after the exact cache has missed.

    Args:
        embed: function that returns the embedding of a text, always of the same length.
        threshold: least cosine similarity of a hit, 0.8..1.
        max_entries: number of entries, of which the least recently used is dropped first.
        ttl_s: seconds for which an entry is found.
        clock: source of the time in seconds.

    Attributes:
        stats: what the cache has done. A failed embedding is an error.

    Raises:
        ValueError: the threshold is out of range.
    """

    def __init__(
        self,
        embed: Embed,
        threshold: float = 0.95,
        max_entries: int = 1024,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not MIN_THRESHOLD <= threshold <= 1:
            raise ValueError(f"threshold must be in {MIN_THRESHOLD}..1, got {threshold}")
        self.stats = StoreStats()
        self._embed = embed
        self._threshold = threshold
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._numbers = itertools.count()
        # Number of an entry to its scope, in the order of use; and the entries by scope and number.
        self._order: OrderedDict[int, str] = OrderedDict()
        self._scopes: dict[str, dict[int, SemanticEntry]] = {}

    def __len__(self) -> int:
        return len(self._order)

    async def get(self, scope: str, text: str) -> bytes | None:
        """Return the answer to the most similar question, or ``None`` if none is similar enough.

        Args:
            scope: key of everything but the text.
            text: the last user text.
        """
        self._drop_expired(scope)
        # Without an entry to compare with, the embedding is not computed.
        vector = await self._unit_vector(text) if scope in self._scopes else None
        entries = self._scopes.get(scope)  # it may have gone meanwhile
        if vector is None or not entries:
            return None
        numbers = list(entries)
        similarities = np.stack([entries[number].vector for number in numbers]) @ vector
        best = int(similarities.argmax())
        # Rounding must not keep a text from being similar to itself.
        if similarities[best] < self._threshold - 1e-6:
            return None
        self._order.move_to_end(numbers[best])
        return entries[numbers[best]].value

    async def put(self, scope: str, text: str, value: bytes) -> None:
        """Keep the answer to a question.

        Args:
            scope: key of everything but the text.
            text: the last user text.
            value: the complete answer.
        """
        vector = await self._unit_vector(text)
        if vector is None:
            return
        while len(self._order) >= self._max_entries:
            self._drop(next(iter(self._order)))
            self.stats.evictions += 1
        number = next(self._numbers)
        self._order[number] = scope
        self._scopes.setdefault(scope, {})[number] = SemanticEntry(vector, value, self._clock() + self._ttl_s)

    def flush(self, prefix: str) -> int:
        """Drop all entries whose scopes begin with a prefix; returns their number."""
        numbers = [number for number, scope in self._order.items() if scope.startswith(prefix)]
        for number in numbers:
            self._drop(number)
        return len(numbers)

    async def _unit_vector(self, text: str) -> Vector | None:
        """Return a text's embedding with length 1, [dim] fp32; ``None`` if there is none."""
        try:
            vector = np.asarray(await self._embed(text), dtype=np.float32)
        except Exception as error:
            self.stats.errors += 1
            LOG.warning("semantic cache: no embedding: %s: %s", type(error).__name__, error)
            return None
        length = float(np.linalg.norm(vector))
        if not math.isfinite(length) or length == 0:
            self.stats.errors += 1
            LOG.warning("semantic cache: the length of an embedding is %g", length)
            return None
        unit: Vector = vector / np.float32(length)
        return unit

    def _drop_expired(self, scope: str) -> None:
        now = self._clock()
        for number, entry in list(self._scopes.get(scope, {}).items()):
            if entry.expiry <= now:
                self._drop(number)

    def _drop(self, number: int) -> None:
        scope = self._order.pop(number)
        del self._scopes[scope][number]
        if not self._scopes[scope]:
            del self._scopes[scope]
