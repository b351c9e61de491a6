"""Routes for administrators: LoRA adapters, sleep, and the prefix cache."""

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fastinfer.server.auth import require_admin
from fastinfer.server.errors import JSON, APIError
from fastinfer.server.protocol.admin import LoadAdapterRequest, UnloadAdapterRequest
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
    if body.load_inplace and body.lora_name in engine.adapters:
        await engine.unload_adapter(body.lora_name)
    await engine.load_adapter(body.lora_name, body.lora_path)
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
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise APIError(400, f"level must be 1 or 2, got {level!r}", param="level")
    await server_of(request).host.engine.sleep(int(level))
    return JSON({"is_sleeping": True})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Get back what ``/sleep`` has freed."""
    await server_of(request).host.engine.wake_up()
    return JSON({"is_sleeping": False})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Say whether memory is freed."""
    return JSON({"is_sleeping": server_of(request).host.engine.health().is_sleeping})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes."""
    await server_of(request).host.engine.reset_prefix_cache()
    return JSON({"success": True})
