"""State that all routes of one server share."""

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from fastinfer.async_engine import AsyncEngine
from fastinfer.server.cache.response_cache import ResponseCache
from fastinfer.server.config import ServerConfig
from fastinfer.server.engine_host import EngineHost
from fastinfer.server.errors import APIError
from fastinfer.server.metrics import Metrics
from fastinfer.server.output_format import OutputFormat
from fastinfer.server.record import record
from fastinfer.server.sse import EventStream, openai_error


@dataclass(eq=False)
class ServerState:
    """State that all routes share.

    Attributes:
        config: the server's settings.
        host: the engine and its state.
        metrics: counters and histograms.
        cache: finished answers; ``None`` for none.
        output_format: how the model marks reasoning and tool calls; set when it is loaded.
        created: Unix time at which the server was made.
    """

    config: ServerConfig
    host: EngineHost
    metrics: Metrics
    cache: ResponseCache | None = None
    output_format: OutputFormat = field(default_factory=OutputFormat)
    created: int = field(default_factory=lambda: int(time.time()))

    def model(self, name: str | None) -> tuple[AsyncEngine, str, str | None]:
        """Return the engine, the model's name in answers, and the LoRA adapter that the name stands for.

        Raises:
            APIError: there is no such model, or no requests are taken now.
        """
        engine = self.host.engine
        if name is None or name in self.config.model_names:
            name, adapter = name or self.config.model_names[0], None
        elif name in engine.adapters:
            adapter = name
        else:
            raise APIError(404, f"model {name!r} does not exist", param="model", code="model_not_found")
        record().model = name
        return engine, name, adapter

    def stream(
        self, frames: AsyncGenerator[bytes, None], failure: Callable[[APIError], bytes] = openai_error
    ) -> EventStream:
        """Return the answer that streams frames with the server's limits; ``failure`` writes an error in the midst."""
        return EventStream(
            frames,
            failure=failure,
            ping_interval_s=self.config.ping_interval_s,
            write_timeout_s=self.config.write_timeout_s,
        )


def server_of(request: Request) -> ServerState:
    """Return the state of the server that handles a request."""
    state: ServerState = request.app.state.server
    return state
