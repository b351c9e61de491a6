"""The interface at ``/openapi.json``. Routes read their bodies themselves, so that bodies are described here."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from fastinfer.server.protocol.admin import LoadAdapterRequest, ResetResponseCacheRequest, UnloadAdapterRequest
from fastinfer.server.protocol.base import RequestModel
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.server.protocol.completions import CompletionRequest
from fastinfer.server.protocol.embeddings import EmbeddingRequest, ScoreRequest
from fastinfer.server.protocol.messages import CountTokensRequest, MessagesRequest
from fastinfer.server.protocol.responses import CountInputRequest, ResponsesRequest
from fastinfer.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": CountInputRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "/reset_response_cache": ResetResponseCacheRequest,
}


def add_bodies(app: FastAPI) -> None:
    """Make the application describe the bodies of its requests."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        schema: dict[str, Any] = describe()
        if "requestBody" in schema["paths"]["/v1/completions"]["post"]:
            return schema
        inputs: Any = [(model, "validation") for model in BODIES.values()]
        references, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, model in BODIES.items():
            content = {"application/json": {"schema": references[model, "validation"]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return schema

    app.openapi = openapi
