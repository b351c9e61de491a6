"""Vectors of texts, for the routes that need them."""

import asyncio
from collections.abc import Sequence

from fastinfer.async_engine import AsyncEngine
from fastinfer.outputs import PrefillOutput
from fastinfer.server.errors import RETRY_FULL_S, APIError, unavailable
from fastinfer.server.generation import RequestOptions

# Texts of one request that are in the engine at once, so that a large request does not fill the queue alone.
MAX_AT_ONCE = 64


async def embed_all(
    engine: AsyncEngine, texts: Sequence[str | list[int]], options: RequestOptions, cache_salt: str
) -> list[PrefillOutput]:
    """Return the embedding of each text.

    Raises:
        APIError: a request has failed.
        FastinferError, UnavailableError: a text is refused.
    """
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def embed(text: str | list[int]) -> PrefillOutput:
        async with room:
            output = await engine.embed(text, cache_salt=cache_salt, **options)
        if output.finish_reason == "timeout":
            raise APIError(504, "the request did not end within its time limit", code="timeout")
        if output.finish_reason == "abort":
            raise unavailable("the server has ended the request", RETRY_FULL_S, "aborted")
        if output.embedding is None:
            raise RuntimeError(f"an embedding failed: {output.stop_reason}")
        return output

    tasks = [asyncio.ensure_future(embed(text)) for text in texts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
