"""The response cache as the routes see it: a store, and one computation per key at a time."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fastinfer.outputs import RequestOutput
from fastinfer.server.cache.answer import decode
from fastinfer.server.cache.memory import MemoryStore
from fastinfer.server.cache.policy import CacheUse
from fastinfer.server.cache.semantic import SemanticCache
from fastinfer.server.cache.single_flight import MAX_WAIT_S, SingleFlight
from fastinfer.server.cache.store import Store, StoreStats

LOG = logging.getLogger("fastinfer.server")


@dataclass(frozen=True)
class Question:
    """The last user text of a conversation.

    Attributes:
        scope: key of the request without it.
        text: the text.
    """

    scope: str
    text: str


class ResponseCache:
    """Finished answers by key (:func:`fastinfer.server.cache.key.cache_key`).

    Args:
        store: where the answers are kept.
        semantic: where answers to similar questions are found; ``None`` for none.

    Attributes:
        store, semantic: the same; they count errors.
    """

    def __init__(self, store: Store, semantic: SemanticCache | None = None) -> None:
        self.store = store
        self.semantic = semantic
        self._flight = SingleFlight()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        key: str,
        use: CacheUse,
        prompts: Sequence[Sequence[int]],
        question: Question | None = None,
        max_wait_s: float = MAX_WAIT_S,
    ) -> "Turn":
        """Look for the answer to a request, which first waits for an equal one that is being computed.

        Args:
            key: the request's key.
            use: what it may do with the cache.
            prompts: its prompts.
            question: the last user text, if an answer to a similar one will do.
            max_wait_s: longest wait for an equal request in seconds.
        """
        leads, value = False, None
        if use.read and use.write:
            leads, value = await self._flight.enter(key, max_wait_s)
        turn = Turn(self, key, question, writes=use.write, leads=leads)
        if not use.read:
            return turn
        try:
            if value is None:
                value = await self.store.get(key)
            turn.outputs = self._decoded(value, prompts)
            if turn.outputs is None and question is not None and self.semantic is not None:
                turn.outputs = self._decoded(await self.semantic.get(question.scope, question.text), prompts)
                if turn.outputs is not None:
                    turn.is_similar = True
                    turn.outputs[0].prompt_token_ids = list(prompts[0])  # which may be longer than the other one
        except BaseException:
            turn.leave()
            raise
        if turn.outputs is not None:
            turn.leave(None if turn.is_similar else value)
        return turn

    async def put(self, key: str, value: bytes, question: Question | None = None) -> None:
        """Store a complete answer, see :func:`fastinfer.server.cache.policy.is_complete`."""
        await self.store.put(key, value)
        if question is not None and self.semantic is not None:
            # The client need not wait for the embedding.
            task = asyncio.create_task(self.semantic.put(question.scope, question.text, value))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def stats(self) -> list[StoreStats]:
        """The statistics of the store and, if there is one, of the semantic cache."""
        return [self.store.stats] if self.semantic is None else [self.store.stats, self.semantic.stats]

    async def flush(self, prefix: str) -> int:
        """Forget the answers whose keys begin with a prefix; returns their number.

        Raises:
            ConnectionError: the store did not answer.
        """
        count = 0 if self.semantic is None else self.semantic.flush(prefix)
        return count + await self.store.flush(prefix)

    async def close(self) -> None:
        """Release the store's connections."""
        for task in self._tasks:
            task.cancel()
        await self.store.close()

    def leave(self, key: str, value: bytes | None) -> None:
        """End the lead of a request, see :class:`SingleFlight`."""
        self._flight.leave(key, value)

    def _decoded(self, value: bytes | None, prompts: Sequence[Sequence[int]]) -> list[RequestOutput] | None:
        if value is None:
            return None
        try:
            return decode(value, prompts)
        except ValueError as error:
            LOG.warning("response cache: %s", error)
            self.store.stats.errors += 1
            return None


class Turn:
    """The use of the cache by one request, from the lookup until its answer is stored or is given up.

    Args:
        cache: the cache.
        key: the request's key.
        question: the last user text, if it is to be found by similar ones.
        writes: whether the answer may be stored.
        leads: whether equal requests wait for this one.

    Attributes:
        outputs: the stored answer; ``None`` if there is none.
        is_similar: whether that is the answer to a similar question.
    """

    def __init__(self, cache: ResponseCache, key: str, question: Question | None, *, writes: bool, leads: bool) -> None:
        self.outputs: list[RequestOutput] | None = None
        self.is_similar = False
        self.writes = writes
        self._cache = cache
        self._key = key
        self._question = question
        self._leads = leads

    async def store(self, value: bytes) -> None:
        """Store the answer, and give it to those who wait for it, whether it can be stored or not."""
        try:
            await self._cache.put(self._key, value, self._question)
        finally:
            self.leave(value)

    def leave(self, value: bytes | None = None) -> None:
        """End the turn; a second call does nothing.

        Args:
            value: the answer for those who wait; without one the next of them computes.
        """
        if self._leads:
            self._leads = False
            self._cache.leave(self._key, value)


def open_cache(url: str | None, max_bytes: int, ttl_s: float, semantic: SemanticCache | None = None) -> ResponseCache:
    """Return a response cache.

    Args:
        url: address of a Redis; ``None`` for the memory of this process.
        max_bytes: size of the cache in memory; Redis has a limit of its own.
        ttl_s: seconds for which an answer is found.
        semantic: where answers to similar questions are found; ``None`` for none.

    Raises:
        ImportError: the package ``redis`` is missing.
        ValueError: the URL is not one of Redis.
    """
    if url is None:
        return ResponseCache(MemoryStore(max_bytes, ttl_s), semantic)
    from fastinfer.server.cache.redis import RedisStore  # which needs a further package

    return ResponseCache(RedisStore(url, ttl_s), semantic)
