"""The store in Redis, against a real redis-server that is killed, hangs, is full, and comes back."""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.manual_clock import ManualClock
from support.redis_server import RedisServer, is_installed, redis_server

if importlib.util.find_spec("redis") is None:
    pytest.skip("needs the package redis", allow_module_level=True)

from fastinfer.server.cache.breaker import CircuitBreaker
from fastinfer.server.cache.redis import MAX_FAILURES, RedisStore
from fastinfer.server.cache.response_cache import ResponseCache, open_cache

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs redis-server (Debian: apt-get install redis-server)")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def patient(url: str, ttl_s: float = 60.0) -> RedisStore:
    """Return a store that bears a busy machine; the time-out is tested where Redis hangs."""
    return RedisStore(url, ttl_s, timeout_s=10.0)


def test_values_come_back_as_they_were(server: RedisServer) -> None:
    async def main() -> None:
        writer, reader = patient(server.url), patient(server.url)
        assert await reader.get("a") is None
        for value in (b"", b"\x80\x04K\x01.", bytes(range(256)) * 400):
            await writer.put("a", value)
            assert await reader.get("a") == value, "another server sees it"
        assert reader.stats.errors == 0
        await writer.close()
        await reader.close()

    asyncio.run(main())


def test_values_expire(server: RedisServer) -> None:
    async def main() -> None:
        store = patient(server.url, ttl_s=0.05)
        await store.put("a", b"x")
        await asyncio.sleep(0.1)
        assert await store.get("a") is None
        assert store.stats.errors == 0
        await store.close()

    asyncio.run(main())


def test_a_value_that_is_too_large_ends_the_older_one(server: RedisServer) -> None:
    async def main() -> None:
        store = RedisStore(server.url, 60, max_value_bytes=3, timeout_s=10)
        await store.put("a", b"old")
        await store.put("a", b"large")
        assert await store.get("a") is None
        await store.close()

    asyncio.run(main())


def test_flush_drops_a_prefix(server: RedisServer) -> None:
    async def main() -> None:
        store = patient(server.url)
        for i in range(1500):
            await store.put(f"x:{i}", b"v")
        await store.put("y:0", b"v")
        assert await store.flush("x:") == 1500
        assert await store.get("x:0") is None
        assert await store.get("y:0") == b"v"
        server.kill()
        with pytest.raises(ConnectionError, match="was not flushed"):
            await store.flush("y:")
        await store.close()

    asyncio.run(main())


def test_killed_half_way(server: RedisServer) -> None:
    """Redis dies while many requests use it, and comes back empty: misses, no errors, and hits again."""

    async def main() -> None:
        cache = open_cache(server.url, max_bytes=0, ttl_s=60)
        store = cache.store
        assert isinstance(store, RedisStore)
        clock = ManualClock()
        store.breaker = CircuitBreaker(MAX_FAILURES, 5.0, clock)
        wrong, done = [], 0

        async def use(name: str) -> None:
            nonlocal done
            for i in range(40):
                key = f"{name}:{i}"
                await cache.put(key, key.encode())
                if await cache.store.get(key) not in (None, key.encode()):
                    wrong.append(key)
                done += 1

        async def kill() -> None:
            while done < 200:
                await asyncio.sleep(0)
            server.kill()

        await asyncio.gather(kill(), *(use(str(i)) for i in range(16)))
        assert not wrong
        assert done == 16 * 40
        assert store.stats.errors >= MAX_FAILURES
        assert store.breaker.is_open
        server.start()
        store.breaker.failed()
        await cache.put("a", b"x")
        assert await cache.store.get("a") is None, "Redis is left alone during the pause"
        clock.now += 5.0
        await _until_found(cache, clock)
        assert not store.breaker.is_open
        await cache.close()

    asyncio.run(main())


async def _until_found(cache: ResponseCache, clock: ManualClock) -> None:
    """Put and get until it works: on a busy machine a call may take longer than the time-out."""
    for _ in range(200):
        await cache.put("a", b"x")
        if await cache.store.get("a") == b"x":
            return
        clock.now += 5.0
    pytest.fail("Redis is not used again")


def test_a_late_answer_is_not_taken_for_the_next_one(server: RedisServer) -> None:
    """A call that was given up leaves its answer on the connection, which must not serve another request."""

    async def main() -> None:
        writer = patient(server.url)
        for key in ("a", "b"):
            await writer.put(key, key.encode())
        store = RedisStore(server.url, 60)
        store.breaker = CircuitBreaker(10**6, 0.0)
        await _until_found(ResponseCache(store), ManualClock())
        server.pause()
        assert await store.get("b") is None
        given_up = asyncio.create_task(store.get("b"))
        await asyncio.sleep(0.01)
        given_up.cancel()
        server.resume()
        answers = [await store.get("a") for _ in range(20)]
        assert set(answers) <= {b"x", None}
        assert b"x" in answers
        await writer.close()
        await store.close()

    asyncio.run(main())


def test_many_at_once_fit_into_the_connections(server: RedisServer) -> None:
    async def main() -> None:
        store = patient(server.url)
        await store.put("a", b"x")
        assert await asyncio.gather(*(store.get("a") for _ in range(300))) == [b"x"] * 300
        assert store.stats.errors == 0
        await store.close()

    asyncio.run(main())


def test_a_full_redis(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        store = patient(server.url)
        store.breaker = CircuitBreaker(10**6, 0.0)
        for i in range(8):
            await store.put(str(i), b"x" * (1 << 20))
        assert store.stats.errors > 0
        assert await store.get("7") is None
        await store.close()

    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        asyncio.run(main(server))


def test_what_is_not_a_redis() -> None:
    with pytest.raises(ValueError, match="redis://"):
        open_cache("http://127.0.0.1:1", max_bytes=0, ttl_s=1)

    async def main() -> None:
        cache = open_cache("redis://127.0.0.1:1", max_bytes=0, ttl_s=1)
        assert isinstance(cache.store, RedisStore)
        cache.store.breaker = CircuitBreaker(MAX_FAILURES, 5.0, ManualClock())
        for _ in range(10):
            await cache.put("a", b"x")
            assert await cache.store.get("a") is None
        assert cache.store.stats.errors == MAX_FAILURES, "the breaker spares the others the wait"
        await cache.close()

    asyncio.run(main())
