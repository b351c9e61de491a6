"""Vectors of texts, for the routes that need them."""

import asyncio
import time
from collections.abc import Mapping

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import RequestError
from fastinfer.outputs import PrefillOutput
from fastinfer.server.errors import as_api_error
from fastinfer.server.generation import RequestOptions, check_end, rest_of

# Texts of one request that are in the engine at once, so that a large request does not fill the queue alone.
MAX_AT_ONCE = 64


async def embed_all(
    engine: AsyncEngine, texts: Mapping[str, str | list[int]], options: RequestOptions, cache_salt: str
) -> list[PrefillOutput]:
    """Return the embedding of each text.

    Args:
        engine: the engine.
        texts: the texts, or their tokens, by their places in the request.
        options: further arguments of the engine; the time limits are those of all texts together.
        cache_salt: salt of the cached prefixes.

    Raises:
        APIError: a text is refused, or a request has failed.
        UnavailableError: no requests are taken now.
    """
    room = asyncio.Semaphore(MAX_AT_ONCE)
    begin = time.monotonic()

    async def embed(place: str, text: str | list[int]) -> PrefillOutput:
        # A text that waits for others here belongs to a request that has begun.
        limits: RequestOptions = {**options, "queue_timeout": None} if room.locked() else options
        async with room:
            limits = rest_of(limits, time.monotonic() - begin)
            try:
                output = await engine.embed(text, cache_salt=cache_salt, **limits)
            except RequestError as error:
                names = {"prompt": place, "prompt_token_ids": place, "priority": "priority"}
                raise as_api_error(error, names) from None
        check_end(engine, output.finish_reason, output.stop_reason)
        return output

    tasks = [asyncio.ensure_future(embed(place, text)) for place, text in texts.items()]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
