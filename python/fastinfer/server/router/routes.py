"""The router's own routes, and those that go to one replica or to all of them."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import fastinfer
from fastinfer.client.endpoint import Headers
from fastinfer.server.disconnect import unless_gone
from fastinfer.server.errors import JSON, RETRY_FULL_S, APIError, response_not_found, unavailable
from fastinfer.server.host_state import HostState
from fastinfer.server.router.broadcast import ask_all, broadcast, names
from fastinfer.server.router.engine_metrics import joined_metrics
from fastinfer.server.router.forward import Forwarded
from fastinfer.server.router.prompts import parse_object
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.routed_request import KEY_HEADERS, RoutedRequest
from fastinfer.server.router.state import RouterState, router_of

# Seconds that a replica has for its metrics. Those who collect them wait for few seconds themselves.
METRICS_S = 2.0
# To one replica.
FORWARDED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/tokenize", "/detokenize"),
)
FORWARDED_GET = ("/", "/tokenizer_info")
# To all servers that can be reached: they change what a server does with later requests, or ask for it.
BROADCAST = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping"),
    *("/reset_prefix_cache", "/reset_response_cache"),
)

router = APIRouter()


@router.head("/health")
@router.get("/health")
@router.get("/ping")
async def health() -> Response:
    """Say that the process works."""
    return JSON({"status": "ok"})


@router.head("/ready")
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether requests are welcome: a replica is ready, and the router is not draining."""
    host = router_of(request).host
    if host.state is HostState.DRAINING:
        reason = host.state.value
    elif any(replica.is_ready for replica in host.replicas):
        return JSON({"status": "ok"})
    else:
        reason = "no replica is ready: " + "; ".join(f"{replica.name}: {replica.reason}" for replica in host.replicas)
    return JSON({"status": "unavailable", "reason": reason}, 503, {"Retry-After": str(RETRY_FULL_S)})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the router's metrics in Prometheus' format, and those of replicas that nobody else can ask for them."""
    router = router_of(request)
    text = router.metrics.text()
    if router.host.has_private_replicas:
        asking = ask_all(
            [replica for replica in router.host.replicas if replica.is_reachable],
            *("GET", "/metrics", _keys(request), b"", METRICS_S),
        )
        answers = await unless_gone(request, asking)
        texts = {replica.name: answer.body.decode() for replica, answer in answers.items() if answer.status == 200}
        text += await asyncio.to_thread(joined_metrics, texts)  # which takes milliseconds for each
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of requests at all replicas."""
    return JSON({"server_load": sum(replica.num_running for replica in router_of(request).host.replicas)})


@router.get("/version")
async def version() -> Response:
    """Return the library's version."""
    return JSON({"version": fastinfer.__version__})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the models of all replicas that are ready."""
    models, _ = await _models(request)
    return JSON({"object": "list", "data": list(models.values())})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Describe one model, whose name may contain slashes."""
    models, silent = await _models(request)
    if name in models:
        return JSON(models[name])
    if silent:
        message = f"no replica that has answered has a model {name!r}; not ready: {names(silent)}"
        raise unavailable(message, RETRY_FULL_S, "no_replica")
    raise APIError(404, f"model {name!r} does not exist", param="model", code="model_not_found")


@router.get("/v1/responses/{id}")
@router.post("/v1/responses/{id}/cancel")
async def find_response(id: str) -> Response:
    """Say that there is no such response, because replicas keep none."""
    raise response_not_found(id)


async def forward(request: Request) -> Response:
    """Let the replica answer that has most of the prompt cached and is not too busy."""
    state = _open(request)
    return Forwarded(state, await RoutedRequest.read(request, state.config.body_timeout_s))


async def to_all(request: Request) -> Response:
    """Let all servers answer, see :func:`~fastinfer.server.router.broadcast.broadcast`."""
    state = _open(request)
    return await broadcast(request, await RoutedRequest.read(request, state.config.body_timeout_s), state.host)


for path in FORWARDED:
    router.add_api_route(path, forward, methods=["POST"])
for path in FORWARDED_GET:
    router.add_api_route(path, forward, methods=["GET"])
router.add_api_route("/", forward, methods=["HEAD"])
for path in BROADCAST:
    router.add_api_route(path, to_all, methods=["GET" if path == "/is_sleeping" else "POST"])


def _open(request: Request) -> RouterState:
    """Return the router's state.

    Raises:
        APIError: it takes no new requests.
    """
    state = router_of(request)
    if state.host.state is HostState.DRAINING:
        raise unavailable("the server is shutting down", RETRY_FULL_S, "draining")
    return state


def _keys(request: Request) -> Headers:
    """Return the headers with the client's keys."""
    return [header for header in request.scope["headers"] if header[0] in KEY_HEADERS]


async def _models(request: Request) -> tuple[dict[str, dict[str, Any]], list[Replica]]:
    """Return the models of all replicas by name, and the replicas that have not answered.

    Raises:
        APIError: no replica answers, or they refuse the client's key.
    """
    router = router_of(request)
    models: dict[str, dict[str, Any]] = {}
    ready = [replica for replica in router.host.replicas if replica.is_ready]
    asking = ask_all(ready, "GET", "/v1/models", _keys(request), b"", router.config.probe_timeout_s)
    answers = {
        replica: answer for replica, answer in (await unless_gone(request, asking)).items() if not answer.is_refusal
    }
    if not answers:
        raise unavailable("no replica is ready", RETRY_FULL_S, "no_replica")
    for answer in answers.values():
        if answer.status != 200:
            error = parse_object(answer.body).get("error", {})
            raise APIError(answer.status, str(error.get("message", "a replica refused")), code=error.get("code"))
        for model in parse_object(answer.body).get("data", []):
            models.setdefault(model["id"], model)
    return models, [replica for replica in router.host.replicas if replica not in answers]
