"""Streams that are recorded: stored when all prompts have ended by themselves, given up in every other case."""

import asyncio
import gc
from typing import Any

import pytest

from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, Transcript
from fastinfer.server.cache.answer import decode
from fastinfer.server.cache.memory import MemoryStore
from fastinfer.server.cache.policy import CacheUse
from fastinfer.server.cache.response_cache import ResponseCache, Turn
from fastinfer.server.cache.streams import Recorder, Recording, Replay

USE = CacheUse(read=True, write=True)
PROMPTS = [[1, 2], [3]]


def output(text: str, reason: str | None = "stop") -> RequestOutput:
    """The last output of an engine, which shows the end of a text alone."""
    transcript = Transcript([7] * 2 + [8] * len(text), 2, bytearray(text.encode()))
    end = (len(text), len(text))
    last = (len(text) - 1, len(text) - 1)
    completion = CompletionOutput.of((transcript, last, last, end), 0, reason, None, None)
    times = RequestMetrics(0.0, 0.0, 0.0, 1.0)
    return RequestOutput("r", None, [1, 2], [completion], reason is not None, times)


class Source:
    """A request that gives what it is told to."""

    def __init__(self, *outputs: RequestOutput | BaseException) -> None:
        self._outputs = list(outputs)
        self.is_abandoned = False

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._outputs:
            raise StopAsyncIteration
        found = self._outputs.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    async def aclose(self) -> None:
        self.is_abandoned = True

    def abandon(self) -> None:
        self.is_abandoned = True


async def lead(cache: ResponseCache) -> Turn:
    turn = await cache.begin("key", USE, PROMPTS)
    assert turn.outputs is None
    assert "key" in cache._flight._waiting
    return turn


async def is_free(cache: ResponseCache) -> bool:
    await asyncio.sleep(0)  # what was called from another thread
    return "key" not in cache._flight._waiting


def test_all_prompts_are_stored_together() -> None:
    async def main() -> None:
        cache = ResponseCache(MemoryStore(10**6, 60))
        recorder = Recorder(await lead(cache), 2)
        sources = [Source(output("ab", None), output("abc")), Source(output("xyz", "length"))]
        streams = [Recording(source, recorder, number) for number, source in enumerate(sources)]
        assert [item.finished async for item in streams[1]] == [True]
        assert not await is_free(cache), "one prompt is still running"
        assert [item.finished async for item in streams[0]] == [False, True]
        assert await is_free(cache)
        turn = await cache.begin("key", USE, PROMPTS)
        assert turn.outputs is not None
        assert await is_free(cache)
        texts = [(found.outputs[0].text, found.outputs[0].token_ids, found.prompt_token_ids) for found in turn.outputs]
        assert texts == [("abc", [8] * 3, [1, 2]), ("xyz", [8] * 3, [3])], (
            "all of the text, though the last output is short"
        )

    asyncio.run(main())


@pytest.mark.parametrize("end", ["error", "abort", "timeout", "raised", "closed", "abandoned", "collected"])
def test_nothing_else_is_stored(end: str) -> None:
    async def main() -> None:
        cache = ResponseCache(MemoryStore(10**6, 60))
        recorder = Recorder(await lead(cache), 1)
        last = OSError("broken") if end == "raised" else output("ab", end)
        source = Source(output("a", None), last)
        stream = Recording(source, recorder, 0)
        await anext(stream)
        if end == "closed":
            await stream.aclose()
            assert source.is_abandoned
        elif end == "abandoned":
            stream.abandon()
            assert source.is_abandoned
        elif end == "raised":
            with pytest.raises(OSError, match="broken"):
                await anext(stream)
        elif end != "collected":
            await anext(stream)
        del stream
        gc.collect()
        assert await is_free(cache)
        assert await cache.store.get("key") is None

    asyncio.run(main())


def test_a_request_that_ends_while_its_answer_is_looked_up_leaves_the_flight() -> None:
    """The store raises, for instance because the client goes while a Redis is asked."""

    class SlowStore(MemoryStore):
        async def get(self, key: str) -> bytes | None:
            await asyncio.sleep(60)
            return None

    async def main() -> None:
        cache = ResponseCache(SlowStore(1000, 100.0))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lead(cache), 0.01)
        assert not cache._flight._waiting

    asyncio.run(main())


def test_a_replay_ends_after_its_output() -> None:
    async def main() -> None:
        stream = Replay(output("a"))
        assert [item.finished async for item in stream] == [True]
        closed = Replay(output("a"))
        await closed.aclose()
        assert [item async for item in closed] == []

    asyncio.run(main())


@pytest.mark.parametrize("value", [b"", b"[]", b"[1, 2]", b'[{"prompt_tokens": 1}, {}]', b"{}", b"\xff"])
def test_values_that_are_no_answers(value: bytes) -> None:
    with pytest.raises(ValueError, match="a stored answer must be JSON of this version"):
        decode(value, PROMPTS)
