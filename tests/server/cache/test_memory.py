"""The store in memory: limits of size and age, and the order in which entries go."""

import asyncio

import pytest
from support.manual_clock import ManualClock

from fastinfer.server.cache.memory import MemoryStore, entry_size


def test_values_come_back() -> None:
    async def main() -> None:
        store = MemoryStore(10_000, 60)
        assert await store.get("a") is None
        await store.put("a", b"1")
        await store.put("a", b"22")
        assert await store.get("a") == b"22"
        assert store.num_bytes == entry_size("a", b"22")

    asyncio.run(main())


def test_the_least_recently_used_entry_goes_first() -> None:
    async def main() -> None:
        store = MemoryStore(3 * entry_size("a", b"x"), 60)
        for key in "abc":
            await store.put(key, b"x")
        assert await store.get("a") == b"x"
        await store.put("d", b"x")
        assert [key for key in "abcd" if await store.get(key)] == ["a", "c", "d"]
        assert store.stats.evictions == 1

    asyncio.run(main())


def test_a_value_that_does_not_fit_replaces_nothing_but_its_own_key() -> None:
    async def main() -> None:
        store = MemoryStore(2 * entry_size("a", b"x"), 60)
        await store.put("a", b"x")
        await store.put("b", b"x")
        await store.put("b", b"x" * 10_000)
        assert await store.get("a") == b"x"
        assert await store.get("b") is None, "the old value is out of date"

    asyncio.run(main())


def test_the_size_is_never_exceeded() -> None:
    async def main() -> None:
        store = MemoryStore(5_000, 60)
        for i in range(200):
            await store.put(str(i % 37), b"x" * (i * 31 % 3000))
            assert store.num_bytes <= 5_000
        assert len(store) > 0
        await store.close()
        assert store.num_bytes == len(store) == 0

    asyncio.run(main())


@pytest.mark.parametrize(("age", "found"), [(59.9, True), (60.0, False), (1e9, False)])
def test_old_values_are_not_found(age: float, found: bool) -> None:
    async def main() -> None:
        clock = ManualClock()
        store = MemoryStore(10_000, 60, clock)
        await store.put("a", b"x")
        clock.now += age
        assert (await store.get("a") == b"x") is found
        assert len(store) == found

    asyncio.run(main())


def test_flush_drops_a_prefix() -> None:
    async def main() -> None:
        store = MemoryStore(10_000, 60)
        for key in ("x:1", "x:2", "y:1"):
            await store.put(key, b"v")
        assert await store.flush("x:") == 2
        assert await store.get("x:1") is None
        assert await store.get("y:1") == b"v"

    asyncio.run(main())
