"""A store in Redis, which several servers share: extra ``redis``."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from fastinfer.server.cache.breaker import CircuitBreaker
from fastinfer.server.cache.store import StoreStats

LOG = logging.getLogger("fastinfer.server")

# A lookup that takes longer costs more than it saves: a prompt's prefill often takes less.
TIMEOUT_S = 0.05
MAX_FAILURES = 3
PAUSE_S = 5.0
# Flushing walks through all keys of Redis, this many per call.
SCAN_COUNT = 1000
FLUSH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 1.0
# Connections; a further call waits for one, and misses after the time-out.
MAX_CONNECTIONS = 64

FAILURES = (RedisError, OSError, asyncio.TimeoutError)

Result = TypeVar("Result")


class RedisStore:
    """Keeps values in Redis. If Redis is down, slow or full, lookups miss and values are not kept.

    Redis itself bounds the total size: set ``maxmemory`` and ``maxmemory-policy allkeys-lru``. Values are stored as
    they are: whoever can write to this Redis can change answers, so keep it in the servers' own network.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``.
        ttl_s: seconds for which a value is found.
        max_value_bytes: largest value that is kept; it must pass the network within the time-out.
        timeout_s: seconds for one call, with its connection.

    Attributes:
        stats: what the store has done; evictions are counted by Redis alone.
        breaker: remembers whether Redis answers.

    Raises:
        ValueError: the URL is not one of Redis.
    """

    def __init__(self, url: str, ttl_s: float, max_value_bytes: int = 1 << 20, timeout_s: float = TIMEOUT_S) -> None:
        self.stats = StoreStats()
        self.breaker = CircuitBreaker(MAX_FAILURES, PAUSE_S)
        self._ttl_ms = round(ttl_s * 1000)
        self._max_value_bytes = max_value_bytes
        self._timeout_s = timeout_s
        # Nothing is retried: a miss is cheap, and the time-out covers one call.
        pool = BlockingConnectionPool.from_url(
            url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        self._redis = Redis.from_pool(pool)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._call(lambda: self._redis.get(key))
        return value

    async def put(self, key: str, value: bytes) -> None:
        # A value that is too large still ends the life of an older one.
        if len(value) > self._max_value_bytes:
            await self._call(lambda: self._redis.unlink(key))
        else:
            await self._call(lambda: self._redis.set(key, value, px=self._ttl_ms))

    async def flush(self, prefix: str) -> int:
        try:
            return await asyncio.wait_for(self._unlink_all(f"{prefix}*"), FLUSH_TIMEOUT_S)
        except FAILURES as error:
            raise ConnectionError(f"the response cache in Redis was not flushed: {error or 'no answer'}") from error

    async def close(self) -> None:
        with contextlib.suppress(*FAILURES):
            await asyncio.wait_for(self._redis.aclose(), CLOSE_TIMEOUT_S)

    async def _unlink_all(self, pattern: str) -> int:
        count = 0
        async for key in self._redis.scan_iter(pattern, SCAN_COUNT):
            count += await self._redis.unlink(key)
        return count

    async def _call(self, call: Callable[[], Awaitable[Result]]) -> Result | None:
        """Return a call's result, or ``None`` if Redis does not answer in time, or is not even asked."""
        if not self.breaker.allows_call():
            return None
        try:
            result = await asyncio.wait_for(call(), self._timeout_s)
        except FAILURES as error:
            self.stats.errors += 1
            self.breaker.failed()
            LOG.warning("response cache: Redis does not answer: %s: %s", type(error).__name__, error)
            return None
        self.breaker.succeeded()
        return result
