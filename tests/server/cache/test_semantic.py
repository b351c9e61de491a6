"""The semantic cache: what counts as similar, and what similarity never overrides."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from support.manual_clock import ManualClock

from fastinfer.server.cache.memory import MemoryStore
from fastinfer.server.cache.policy import CacheUse
from fastinfer.server.cache.response_cache import Question, ResponseCache
from fastinfer.server.cache.semantic import SemanticCache


async def angle(text: str) -> Sequence[float]:
    """Embed a number of degrees as a direction; its length must not matter."""
    radians = math.radians(float(text))
    return [3 * math.cos(radians), 3 * math.sin(radians), 0.0]


def test_the_most_similar_one_above_the_threshold() -> None:
    async def main() -> None:
        cache = SemanticCache(angle, threshold=0.95)  # 18.2 degrees
        await cache.put("s", "0", b"zero")
        await cache.put("s", "30", b"thirty")
        assert await cache.get("s", "10") == b"zero"
        assert await cache.get("s", "16") == b"thirty"
        assert await cache.get("s", "48") == b"thirty"
        assert await cache.get("s", "49") is None
        assert await cache.get("s", "210") is None, "the opposite direction"

    asyncio.run(main())


def test_the_same_text_is_always_a_hit() -> None:
    async def main() -> None:
        cache = SemanticCache(angle, threshold=1.0)
        for degrees in range(0, 360, 7):
            await cache.put("s", str(degrees), str(degrees).encode())
        for degrees in range(0, 360, 7):
            assert await cache.get("s", str(degrees)) == str(degrees).encode()

    asyncio.run(main())


def test_scopes_share_nothing() -> None:
    async def main() -> None:
        cache = SemanticCache(angle)
        await cache.put("tenant1:", "0", b"secret")
        assert await cache.get("tenant2:", "0") is None
        assert await cache.get("tenant1", "0") is None
        assert cache.flush("tenant2:") == 0
        assert cache.flush("tenant1:") == 1
        assert await cache.get("tenant1:", "0") is None

    asyncio.run(main())


def test_limits_of_number_and_age() -> None:
    async def main() -> None:
        clock = ManualClock(0.0)
        cache = SemanticCache(angle, max_entries=2, ttl_s=10, clock=clock)
        await cache.put("s", "0", b"a")
        await cache.put("t", "90", b"b")
        assert await cache.get("s", "0") == b"a"
        clock.now = 5.0
        await cache.put("s", "180", b"c")
        assert await cache.get("t", "90") is None, "it was used least recently"
        assert (len(cache), cache.stats.evictions) == (2, 1)
        clock.now = 10.0
        assert await cache.get("s", "0") is None
        assert await cache.get("s", "180") == b"c"

    asyncio.run(main())


def test_nothing_is_embedded_for_a_scope_without_entries() -> None:
    async def main() -> None:
        texts = []

        async def embed(text: str) -> Sequence[float]:
            texts.append(text)
            return await angle(text)

        clock = ManualClock(0.0)
        cache = SemanticCache(embed, ttl_s=10, clock=clock)
        assert await cache.get("s", "1") is None
        await cache.put("s", "2", b"two")
        clock.now = 10.0
        assert await cache.get("s", "3") is None
        assert texts == ["2"]

    asyncio.run(main())


def test_a_similar_question_has_its_own_number_of_tokens() -> None:
    async def main() -> None:
        cache, use = ResponseCache(MemoryStore(1000, 10.0), SemanticCache(angle)), CacheUse(read=True, write=True)
        await cache.semantic.put("s", "0", b'[{"prompt_tokens": 2, "cached_tokens": 0, "completions": []}]')
        turn = await cache.begin("key", use, [[1, 2, 3, 4]], Question("s", "1"))
        assert turn.is_similar
        assert [output.prompt_token_ids for output in turn.outputs] == [[1, 2, 3, 4]]

    asyncio.run(main())


@pytest.mark.parametrize("vector", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], None])
def test_a_bad_embedding_is_a_miss(vector: list[float] | None) -> None:
    async def main() -> None:
        is_bad = False

        async def embed(text: str) -> Sequence[float]:
            if is_bad and vector is None:
                raise RuntimeError("no model")
            return vector if is_bad and vector is not None else [1.0, 0.0]

        cache = SemanticCache(embed)
        await cache.put("s", "x", b"good")
        is_bad = True
        await cache.put("s", "y", b"bad")
        assert await cache.get("s", "x") is None
        assert (len(cache), cache.stats.errors) == (1, 2)
        is_bad = False
        assert await cache.get("s", "x") == b"good"

    asyncio.run(main())


@pytest.mark.parametrize("threshold", [0.79, 1.01, math.nan])
def test_thresholds_out_of_range(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold must be in 0\.8\.\.1, got"):
        SemanticCache(angle, threshold)
