"""Requests that are checked in any thread and queued later, by the thread that runs the engine.

Each function checks a request and returns the function that queues it, which returns the request's id.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastinfer.engine.engine import Engine
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.serving.prompt import PreparedPrompt

QueueRequest = Callable[[], str]


def generation_job(
    engine: Engine, prompt: PreparedPrompt, params: SamplingParams, adapter: str | None = None, **options: Any
) -> QueueRequest:
    """Check a request for text.

    Args:
        engine: engine that will run the request.
        prompt: the prompt.
        params: sampling parameters.
        adapter: name of a LoRA adapter.
        options: ``request_id``, ``priority`` and timeouts, see :meth:`fastinfer.engine.engine.Engine.add_request`.

    Raises:
        RequestError: the request can never be served.
    """
    valid = engine.validate(prompt.token_ids, params, adapter, images=prompt.images, layout=prompt.layout)
    return partial(
        engine.add_request,
        valid,
        params,
        prompt=prompt.text,
        cache_salt=prompt.cache_salt,
        adapter=adapter,
        **options,
    )


def beam_search_job(
    engine: Engine, prompt: PreparedPrompt, params: BeamSearchParams, adapter: str | None = None, **options: Any
) -> QueueRequest:
    """Check a beam search; arguments and errors are those of :func:`generation_job`."""
    valid = engine.validate_beam_search(prompt.plain_token_ids, params, adapter)
    return partial(
        engine.add_beam_request,
        valid,
        params,
        prompt=prompt.text,
        cache_salt=prompt.cache_salt,
        adapter=adapter,
        **options,
    )


def embedding_job(engine: Engine, prompt: PreparedPrompt, adapter: str | None = None, **options: Any) -> QueueRequest:
    """Check a request for an embedding.

    Arguments and errors are those of :func:`generation_job`; ``options`` also has ``pooling`` and ``normalize``, see
    :meth:`fastinfer.engine.engine.Engine.add_embedding_request`.
    """
    valid = engine.validate(prompt.plain_token_ids, adapter=adapter, generates=False)
    return partial(engine.add_embedding_request, valid, cache_salt=prompt.cache_salt, adapter=adapter, **options)


def pinned_prompt_job(
    engine: Engine, name: str, prompt: PreparedPrompt, adapter: str | None = None, request_id: str | None = None
) -> QueueRequest:
    """Check a pinned prompt; arguments and errors are those of :func:`generation_job`."""
    valid = engine.validate(prompt.token_ids, adapter=adapter, layout=prompt.layout)
    return partial(engine.pin_prompt, name, valid, request_id=request_id, cache_salt=prompt.cache_salt, adapter=adapter)
