"""Requests and the response cache: which key a request has, and what its headers ask for."""

import functools
import hashlib
import secrets
from collections.abc import Sequence

from starlette.requests import Request

import fastinfer
from fastinfer.async_engine import AsyncEngine
from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.server.auth import tenant_of
from fastinfer.server.cache.key import ALL, ModelIdentity, cache_key, model_scope
from fastinfer.server.cache.policy import cache_use
from fastinfer.server.cache.response_cache import Question, ResponseCache, Turn, open_cache
from fastinfer.server.cache.semantic import SemanticCache
from fastinfer.server.cache.single_flight import MAX_WAIT_S
from fastinfer.server.chat_prompt import chat_prompt
from fastinfer.server.config import ServerConfig
from fastinfer.server.engine_host import EngineHost
from fastinfer.server.errors import APIError
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.record import record
from fastinfer.server.state import ServerState, server_of
from fastinfer.serving.prompt import PreparedPrompt

# It asks to cache an answer although a repetition would give another one.
SAMPLED_HEADER = "x-cache-sampled"
_SWITCH = {"0": False, "false": False, "1": True, "true": True}
# Longer texts are compared badly by one vector.
MAX_QUESTION_CHARS = 2000
# An engine that does not know its weights shares no answers with other processes.
_THIS_PROCESS = secrets.token_hex(16)


def make_cache(config: ServerConfig, host: EngineHost) -> ResponseCache | None:
    """Return the response cache of a server; ``None`` if it is off.

    Raises:
        ImportError: the package ``redis`` is missing.
        ValueError: the URL is not one of Redis, or the threshold is out of range.
    """
    if config.response_cache == "off":
        return None

    async def embed(text: str) -> Sequence[float]:
        # With a salt of its own, so that no time tells which questions were asked before.
        output = await host.engine.embed(text, cache_salt=secrets.token_hex(8))
        if output.embedding is None:
            raise RuntimeError(f"{output.finish_reason}: {output.stop_reason}")
        return output.embedding

    ttl_s, threshold = config.response_cache_ttl_s, config.semantic_threshold
    semantic = None if threshold is None else SemanticCache(embed, threshold, ttl_s=ttl_s)
    url = None if config.response_cache == "memory" else config.response_cache
    return open_cache(url, config.response_cache_bytes, ttl_s, semantic)


def model_identity(engine: AsyncEngine, adapter: str | None) -> ModelIdentity | None:
    """Return the identity of a model, perhaps with a LoRA adapter; ``None`` if the adapter has not been read yet."""
    digest = "" if adapter is None else engine.adapter_digest(adapter)
    if adapter is not None and not digest:
        return None
    template = _digest(repr(engine.tokenizer.chat_template))
    limits = f"{fastinfer.__version__}/{engine.max_model_len}"
    return ModelIdentity(engine.fingerprint or _THIS_PROCESS, digest, template, limits)


def cache_scope(server: ServerState, model: str | None, tenant: str | None) -> str:
    """Return what the keys of a model and a tenant begin with; ``None`` stands for all.

    Raises:
        APIError: there is no such model, or nothing is stored for it yet because its adapter has not been read.
    """
    if model is None:
        return ALL
    engine, name, adapter = server.model(model)
    identity = model_identity(engine, adapter)
    if identity is None:
        raise APIError(400, f"model {name!r} has not been loaded yet", param="model")
    return model_scope(identity, tenant)


async def begin_turn(
    request: Request,
    engine: AsyncEngine,
    prompts: Sequence[PreparedPrompt],
    params: SamplingParams,
    adapter: str | None,
    question: Question | None,
    timeout: float | None,
) -> Turn | None:
    """Look for a stored answer; returns ``None`` if the request has nothing to do with the cache.

    Args:
        request: the HTTP request.
        engine: the engine.
        prompts: its prompts.
        params: their sampling parameters.
        adapter: name of the LoRA adapter.
        question: what :func:`question_of` has returned.
        timeout: seconds until the request must have begun or ended; ``None`` for no limit.

    Raises:
        APIError: the header ``X-Cache-Sampled`` has another value than 0, 1, false or true.
    """
    server = server_of(request)
    sampled = _SWITCH.get(request.headers.get(SAMPLED_HEADER, "0").lower())
    if sampled is None:
        raise APIError(400, f"X-Cache-Sampled must be 1 or 0, got {request.headers[SAMPLED_HEADER]!r}")
    if server.cache is None:
        return None
    use = cache_use(params, request.headers.get("cache-control", ""), sampled)
    model = model_identity(engine, adapter)
    turn = None
    if (use.read or use.write) and model is not None:
        token_ids = [prompt.contents for prompt in prompts]
        key = cache_key(model, tenant_of(request), token_ids, params, {"salt": prompts[0].cache_salt})
        # The client of a stream expects the first token soon, and does not wait for an equal request.
        is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
        max_wait_s = 0.0 if is_stream else min(MAX_WAIT_S, timeout or MAX_WAIT_S)
        turn = await server.cache.begin(key, use, token_ids, question, max_wait_s)
    if turn is None or not use.read:
        result = "bypass"
    elif turn.outputs is None:
        result = "miss"
    else:
        result = "semantic" if turn.is_similar else "hit"
    record().cache = result
    server.metrics.count_cache(result)
    return turn


async def question_of(
    request: Request, engine: AsyncEngine, body: ChatRequest, params: SamplingParams, adapter: str | None
) -> Question | None:
    """Return the last user text of a chat, if an answer to a similar text will do; ``None`` if not.

    Args:
        request: the HTTP request.
        engine: the engine.
        body: the chat.
        params: its sampling parameters.
        adapter: name of the LoRA adapter.
    """
    cache = server_of(request).cache
    model = model_identity(engine, adapter)
    if cache is None or cache.semantic is None or model is None or params.logits_processors:
        return None
    *before, last = body.messages
    text = last.text
    is_question = last.role == "user" and 0 < len(text) <= MAX_QUESTION_CHARS and not last.has_images
    if not is_question or body.continue_final_message or params.truncate_prompt_tokens is not None:
        return None
    # Everything else must be equal, as the template renders it: the text is replaced by the same one in all requests.
    rest = body.model_copy(update={"messages": [*before, last.model_copy(update={"content": "-"})]})
    prompt = await chat_prompt(server_of(request), rest, "")
    answer = {"salt": body.cache_salt or "", "question": True}
    return Question(cache_key(model, tenant_of(request), [prompt.contents], params, answer), text)


@functools.lru_cache(maxsize=16)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
