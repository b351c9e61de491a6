"""``/v1/embeddings`` and ``/v1/score``."""

import base64
import secrets
import struct
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.outputs import PrefillOutput
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.embedding import embed_all
from fastinfer.server.errors import JSON, APIError
from fastinfer.server.generation import cache_salt, request_options
from fastinfer.server.protocol.base import parse
from fastinfer.server.protocol.embeddings import EmbeddingRequest, ScoreRequest
from fastinfer.server.state import server_of

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Return the mean of each text's last hidden states, scaled to length 1."""
    server = server_of(request)
    body = await parse(request, EmbeddingRequest, server.config.body_timeout_s)
    engine, model, adapter = server.model(body.model)
    options = request_options(request, server, adapter, body.priority)
    outputs = await unless_gone(request, embed_all(engine, body.inputs(), options, cache_salt(request, body)))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output.embedding, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    return JSON({"object": "list", "data": data, "model": model, "usage": _usage(outputs)})


@router.post("/v1/score")
async def create_score(request: Request) -> Response:
    """Return the cosine similarity of one text with each of several, or of the two texts of each pair."""
    server = server_of(request)
    body = await parse(request, ScoreRequest, server.config.body_timeout_s)
    engine, model, adapter = server.model(body.model)
    first, second = body.texts()
    if len(first) not in (1, len(second)):
        raise APIError(400, f"text_1 must have 1 or {len(second)} texts, got {len(first)}", param="text_1")
    options = request_options(request, server, adapter, body.priority)
    outputs = await unless_gone(request, embed_all(engine, first | second, options, cache_salt(request, body)))
    left = [output.embedding or [] for output in outputs[: len(first)]] * (len(second) // len(first))
    right = [output.embedding or [] for output in outputs[len(first) :]]
    # Rounding may take the product of two equal vectors beyond 1.
    scores = [min(sum(a * b for a, b in zip(*pair, strict=True)), 1.0) for pair in zip(left, right, strict=True)]
    return JSON(
        {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": _usage(outputs),
        }
    )


def _encoded(embedding: list[float] | None, encoding: str | None) -> list[float] | str:
    """Return a vector as a list, or as fp32 in little-endian base64."""
    assert embedding is not None
    if encoding != "base64":
        return embedding
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()


def _usage(outputs: list[PrefillOutput]) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
