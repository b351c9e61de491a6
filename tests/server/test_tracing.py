"""Traces: a span per request at a real receiver; one that is down, slow or wrong costs spans alone."""

import asyncio
import socket
import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from support.otlp_receiver import attributes, otlp_receiver
from support.toy import ToyModel
from support.toy_server import NAME, toy_client

from fastinfer.server import tracing

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(url: str, **settings: Any) -> Any:
    return toy_client(otlp_traces_endpoint=url, response_cache="memory", **settings)


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_per_request(stream: bool) -> None:
    async def main() -> None:
        async with traced(receiver.url) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
            body = {**CHAT, "stream": stream, "top_p": 0.9, "n": 2}
            begin = time.time_ns()
            await client.post("/v1/chat/completions", json=body, headers=headers)
            end = time.time_ns()
            await client.post("/v1/chat/completions", json=body)
            await client.get("/health")
            times.extend((begin, end))

    times: list[int] = []
    with otlp_receiver() as receiver:
        asyncio.run(main())  # the server's end sends what there is
        span, replayed = receiver.wait_for(2)
        assert receiver.resources[0]["service.name"] == "fastinfer"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "POST /v1/chat/completions"
    assert times[0] <= span.start_time_unix_nano < span.end_time_unix_nano <= times[1]
    found = attributes(span.attributes)
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.response.model": NAME,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.response.finish_reasons": ["length"],
        "fastinfer.cache": "miss",
    }
    latencies = {f"gen_ai.latency.{name}" for name in ("time_in_queue", "time_to_first_token", "time_in_model_prefill")}
    assert {name: found[name] for name in expected} == expected
    assert found.keys() == expected.keys() | latencies | {"gen_ai.latency.e2e"}
    assert all(0 <= found[name] <= found["gen_ai.latency.e2e"] for name in latencies)
    assert "hello" not in str(span)
    assert replayed.trace_id.hex() != TRACE
    found = attributes(replayed.attributes)
    assert (found["fastinfer.cache"], found["gen_ai.usage.completion_tokens"]) == ("hit", 6)
    assert not latencies & found.keys(), "the engine has not seen it"


def test_errors_and_parents() -> None:
    """An invalid parent is no parent; an unsampled one keeps the span from being sent."""

    async def main() -> None:
        model = ToyModel()
        async with traced(receiver.url) as client:
            for parent in ("nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", "x" * 10_000):
                await client.post("/v1/chat/completions", json={}, headers={"traceparent": parent})
        async with traced(receiver.url) as client:
            await client.post("/v1/chat/completions", json={**CHAT, "model": "none"})
        async with toy_client(model, otlp_traces_endpoint=receiver.url) as client:
            model.fail = True
            await client.post("/v1/chat/completions", json=CHAT)

    with otlp_receiver() as receiver:
        asyncio.run(main())
        spans = receiver.wait_for(5)
    assert len(spans) == 5
    found = [(attributes(span.attributes), span.status.code, span.parent_span_id) for span in spans]
    for values, code, parent in found[:3]:
        assert (values["http.response.status_code"], values["error.type"], code, parent) == (
            400,
            "invalid_request_error",
            0,
            b"",
        )
    assert (found[3][0]["error.type"], found[3][1]) == ("model_not_found", 0)
    values, code, _ = found[4]
    assert (values["http.response.status_code"], values["error.type"], code) == (500, "server_error", 2)


@pytest.mark.parametrize("fault", ["down", "hangs", "refuses"])
def test_a_faulty_receiver_holds_up_nobody(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered while an export hangs, spans beyond a bound are dropped, and the server ends soon."""
    monkeypatch.setattr(tracing, "MAX_WAITING_SPANS", 4)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
    # The batch must not be larger than the queue.
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")

    async def main(url: str) -> None:
        async with traced(url) as client:
            await client.get("/version")
            await client.get("/version")
            if fault == "hangs":
                await asyncio.to_thread(receiver.wait_for_post)
            for _ in range(20):
                answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
                assert answer.status_code == 200
                assert answer.text.endswith("[DONE]\n\n")

    with otlp_receiver() as receiver:
        url = receiver.url
        if fault == "down":
            with socket.create_server(("127.0.0.1", 0)) as free:
                url = f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"
        elif fault == "hangs":
            receiver.gate.clear()
        else:
            receiver.status = 400
        asyncio.run(asyncio.wait_for(main(url), 30))
