"""Traces: a span per request, sent by OTLP over HTTP: extra ``otel``."""

import asyncio
import contextlib
import threading
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import fastinfer
from fastinfer.server.logs import PROBES
from fastinfer.server.record import RequestRecord

# Spans that wait for the collector; further ones push out the oldest.
MAX_WAITING_SPANS = 2048
EXPORT_TIMEOUT_S = 5.0
# After this time a batch is sent that is not full.
SEND_DELAY_MS = 2000
# Seconds that the last spans get when the server ends.
FLUSH_S = 2.0


class Tracing:
    """Makes a span of each request that has ended, and sends spans in batches, in a thread of its own.

    A collector that is down, slow or wrong costs spans and nothing else. The caller's span, from ``traceparent``, is
    the parent; if it is not sampled, neither is ours. ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``,
    ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS`` have their usual meanings.

    Args:
        endpoint: URL to which spans are posted, such as ``http://127.0.0.1:4318/v1/traces``.
    """

    def __init__(self, endpoint: str) -> None:
        # Attributes from the environment win.
        ours = Resource({SERVICE_NAME: "fastinfer", SERVICE_VERSION: fastinfer.__version__})
        environment = Resource.create()
        if environment.attributes[SERVICE_NAME].startswith("unknown_service"):
            resource = environment.merge(ours)
        else:
            resource = ours.merge(environment)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, MAX_WAITING_SPANS, schedule_delay_millis=SEND_DELAY_MS)
        )
        self._tracer = self._provider.get_tracer("fastinfer.server", fastinfer.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def trace_request(self, request: RequestRecord) -> None:
        """Make the span of a request that has ended, except of a successful probe."""
        if request.path in PROBES and request.status == 200:
            return
        parent = self._propagator.extract({"traceparent": request.traceparent} if request.traceparent else {})
        span = self._tracer.start_span(
            f"{request.method} {request.path}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes_of(request),
            start_time=request.start_ns,
        )
        if request.status >= 500 or (request.status == 200 and request.error):  # an error during a stream
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(request.start_ns + int(request.seconds * 1e9))

    async def close(self) -> None:
        """Send the last spans, but do not wait for long."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
                loop.call_soon_threadsafe(done.set)

        # Python does not wait for such a thread at its end.
        threading.Thread(target=shut_down, daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), FLUSH_S)
        except asyncio.TimeoutError:
            return


def attributes_of(request: RequestRecord) -> dict[str, Any]:
    """Return a span's attributes, under the names of HTTP's and vLLM's conventions; times are in seconds."""
    attributes = {
        "http.request.method": request.method,
        "http.route": request.path,
        "http.response.status_code": request.status,
        "error.type": request.error,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.model,
        "fastinfer.cache": request.cache,
    }
    if (params := request.params) is not None:
        attributes |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    if request.finish_reasons:
        attributes |= {
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_tokens,
            "gen_ai.response.finish_reasons": sorted(request.finish_reasons),
            "gen_ai.latency.e2e": request.seconds,
        }
    times = request.times
    if times is not None and times.first_scheduled_time is not None:
        attributes["gen_ai.latency.time_in_queue"] = times.queue_time
        if times.first_token_time is not None:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_token_time - times.arrival_time
            prefill = times.first_token_time - times.first_scheduled_time
            attributes["gen_ai.latency.time_in_model_prefill"] = prefill
    return {name: value for name, value in attributes.items() if value is not None}
