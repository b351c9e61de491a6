"""Routes for administrators: LoRA adapters, sleep, and the caches."""

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fastinfer.server.auth import require_admin
from fastinfer.server.caching import cache_scope
from fastinfer.server.errors import JSON, RETRY_FULL_S, APIError, unavailable
from fastinfer.server.protocol.admin import (
    LoadAdapterRequest,
    ResetResponseCacheRequest,
    SleepRequest,
    UnloadAdapterRequest,
)
from fastinfer.server.protocol.base import parse
from fastinfer.server.state import server_of

router = APIRouter(dependencies=[Depends(require_admin)])


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder of the server; it is then a model of its own."""
    server = server_of(request)
    body = await parse(request, LoadAdapterRequest, server.config.body_timeout_s)
    engine = server.host.engine
    if body.lora_name in server.config.model_names:
        raise APIError(400, f"lora_name must not be the model's, got {body.lora_name!r}", param="lora_name")
    await engine.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Forget a LoRA adapter."""
    server = server_of(request)
    body = await parse(request, UnloadAdapterRequest, server.config.body_timeout_s)
    engine = server.host.engine
    if body.lora_name not in engine.adapters:
        message = f"adapter {body.lora_name!r} does not exist"
        raise APIError(404, message, param="lora_name", code="model_not_found")
    await engine.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Wait until all requests have ended, and free memory; ``?level=2`` frees the weights too."""
    await _check_options(request, "level")
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise APIError(400, f"level must be 1 or 2, got {level!r}", param="level")
    await server_of(request).host.engine.sleep(int(level))
    return JSON({"is_sleeping": True})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Get back what ``/sleep`` has freed."""
    await _check_options(request)
    await server_of(request).host.engine.wake_up()
    return JSON({"is_sleeping": False})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Say whether memory is freed."""
    return JSON({"is_sleeping": server_of(request).host.engine.health().is_sleeping})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes."""
    await _check_options(request)
    await server_of(request).host.engine.reset_prefix_cache()
    return JSON({"success": True})


@router.post("/reset_response_cache")
async def reset_response_cache(request: Request) -> Response:
    """Forget stored answers: of a model and a tenant, of a model, or all."""
    server = server_of(request)
    body = await parse(request, ResetResponseCacheRequest, server.config.body_timeout_s)
    if server.cache is None:
        raise APIError(400, "the server has no response cache (--response-cache)")
    if body.tenant is not None and body.model is None:
        raise APIError(400, "model is missing, which tenant needs", param="model")
    try:
        count = await server.cache.flush(cache_scope(server, body.model, body.tenant))
    except ConnectionError as error:
        raise unavailable(str(error), RETRY_FULL_S, "cache_unavailable") from None
    return JSON({"num_dropped": count})


async def _check_options(request: Request, *names: str) -> None:
    """Check that a request without a body has no options but these parameters of its query.

    Raises:
        APIError: it has others.
    """
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        await parse(request, SleepRequest, server_of(request).config.body_timeout_s)
    for name in request.query_params.keys() - set(names):
        raise APIError(400, f"{name} is not a parameter of this request", param=name)
