"""Vectors of texts, for the routes that need them."""

import asyncio
from collections.abc import Mapping

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import RequestError
from fastinfer.outputs import PrefillOutput
from fastinfer.server.errors import RETRY_FULL_S, APIError, as_api_error, unavailable
from fastinfer.server.generation import RequestOptions

# Texts of one request that are in the engine at once, so that a large request does not fill the queue alone.
MAX_AT_ONCE = 64


async def embed_all(
    engine: AsyncEngine, texts: Mapping[str, str | list[int]], options: RequestOptions, cache_salt: str
) -> list[PrefillOutput]:
    """Return the embedding of each text.

    Args:
        engine: the engine.
        texts: the texts, or their tokens, by their places in the request.
        options: further arguments of the engine.
        cache_salt: salt of the cached prefixes.

    Raises:
        APIError: a text is refused, or a request has failed.
        UnavailableError: no requests are taken now.
    """
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def embed(place: str, text: str | list[int]) -> PrefillOutput:
        async with room:
            try:
                output = await engine.embed(text, cache_salt=cache_salt, **options)
            except RequestError as error:
                names = {"prompt": place, "prompt_token_ids": place, "priority": "priority"}
                raise as_api_error(error, names) from None
        if output.finish_reason == "timeout":
            raise APIError(504, "the request did not end within its time limit", code="timeout")
        if output.finish_reason == "abort":
            raise unavailable("the server has ended the request", RETRY_FULL_S, "aborted")
        if output.embedding is None:
            raise RuntimeError(f"an embedding failed: {output.stop_reason}")
        return output

    tasks = [asyncio.ensure_future(embed(place, text)) for place, text in texts.items()]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
