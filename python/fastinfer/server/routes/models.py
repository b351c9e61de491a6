"""``/v1/models``: the model and its LoRA adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from fastinfer.server.errors import JSON, APIError
from fastinfer.server.state import ServerState, server_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names that requests may give as their model."""
    return JSON({"object": "list", "data": _models(server_of(request))})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Describe one model, whose name may contain slashes."""
    for model in _models(server_of(request)):
        if model["id"] == name:
            return JSON(model)
    raise APIError(404, f"model {name!r} does not exist", param="model", code="model_not_found")


def _models(server: ServerState) -> list[dict[str, Any]]:
    engine, names = server.host.loaded, server.config.model_names
    length = None if engine is None else engine.max_model_len
    modalities = None if engine is None else ["text", "image"] if engine.takes_images else ["text"]
    adapters = [] if engine is None else engine.adapters

    def describe(name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "fastinfer",
            "root": names[0],
            "parent": parent,
            "max_model_len": length,
            "input_modalities": modalities,
        }

    return [describe(name, None) for name in names] + [describe(name, names[0]) for name in adapters]
