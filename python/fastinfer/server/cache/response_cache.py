"""The response cache as the routes see it: a store, and one computation per key at a time."""

from fastinfer.server.cache.memory import MemoryStore
from fastinfer.server.cache.single_flight import SingleFlight
from fastinfer.server.cache.store import Store


class ResponseCache:
    """Finished answers by key (:func:`fastinfer.server.cache.key.cache_key`).

    Args:
        store: where the answers are kept.

    Attributes:
        store: the same; it counts hits and misses.
        single_flight: asynchronous context manager that lets one request per key compute, see :class:`SingleFlight`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.single_flight = SingleFlight()

    async def get(self, key: str) -> bytes | None:
        """Return the stored answer, or ``None``."""
        return await self.store.get(key)

    async def put(self, key: str, value: bytes) -> None:
        """Store a complete answer, see :func:`fastinfer.server.cache.policy.is_complete`."""
        await self.store.put(key, value)

    async def flush(self, scope: str) -> int:
        """Forget a model's answers to a tenant (:func:`fastinfer.server.cache.key.model_scope`); returns their number.

        "fastinfer:" stands for everything.
        """
        return await self.store.flush(scope)

    async def close(self) -> None:
        """Release the store's connections."""
        await self.store.close()


def open_cache(url: str | None, max_bytes: int, ttl_s: float) -> ResponseCache:
    """Return a response cache.

    Args:
        url: address of a Redis; ``None`` for the memory of this process.
        max_bytes: size of the cache in memory; Redis has a limit of its own.
        ttl_s: seconds for which an answer is found.

    Raises:
        ImportError: the package ``redis`` is missing.
        ValueError: the URL is not one of Redis.
    """
    if url is None:
        return ResponseCache(MemoryStore(max_bytes, ttl_s))
    from fastinfer.server.cache.redis import RedisStore  # which needs a further package

    return ResponseCache(RedisStore(url, ttl_s))
