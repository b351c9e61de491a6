"""Logs: a line per request, with what happened and without what was said."""

import asyncio
import io
import json
import logging
import os
import re
import threading
from typing import Any

import pytest
from support.toy import ToyModel
from support.toy_server import NAME, toy_client

from fastinfer.server import logs
from fastinfer.server.logs import logging_to

SECRETS = ("hello", "sesame")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
KEY = {"Authorization": "Bearer sesame"}


def logged(action: Any, form: str = "json", level: str = "info") -> list[str]:
    """The lines that are logged while a coroutine function runs."""
    stream = io.StringIO()
    with logging_to(stream, form, level):
        asyncio.run(action())
    return stream.getvalue().splitlines()


def test_a_line_per_request() -> None:
    async def requests() -> None:
        async with toy_client(api_keys=("sesame",), response_cache="memory") as client:
            for stream in (False, True):
                headers = {**KEY, "X-Request-Id": f"mine-{stream}"}
                await client.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
            await client.post("/v1/chat/completions", json={"messages": "hello"}, headers=KEY)
            await client.post("/v1/chat/completions", json={**CHAT, "model": "hello"}, headers=KEY)
            await client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": "Bearer hello"})
            await client.get("/nowhere/hello", headers=KEY)
            await client.get("/metrics", headers=KEY)
            await client.get("/health")

    lines = [json.loads(line) for line in logged(requests)]
    assert not [secret for secret in SECRETS if secret in json.dumps(lines)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert all(line["duration_s"] > 0 and line["level"] == "info" for line in lines)
    plain, stream, wrong, unknown, forbidden, nowhere = lines  # and none of the probes
    expected = {
        "logger": "fastinfer.server.requests",
        "message": "request",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": NAME,
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "finish_reason": "length",
    }
    assert plain.items() >= {**expected, "request_id": "mine-False", "cache": "miss"}.items()
    assert stream.items() >= {**expected, "request_id": "mine-True", "cache": "hit"}.items()
    assert (wrong["status"], wrong["error"]) == (400, "invalid_request_error")
    assert (unknown["status"], unknown["error"]) == (404, "model_not_found")
    assert (forbidden["status"], forbidden["path"], forbidden["error"]) == (401, "none", "invalid_api_key")
    assert (nowhere["status"], nowhere["path"], nowhere["error"]) == (404, "none", "invalid_request_error")


def test_errors_have_the_id_of_their_request() -> None:
    async def requests() -> None:
        model = ToyModel()
        model.fail = True
        async with toy_client(model) as client:
            for stream in (False, True):
                headers = {"X-Request-Id": f"mine-{stream}"}
                await client.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)

    lines = [json.loads(line) for line in logged(requests)]
    errors = [line for line in lines if line["level"] == "error" and line["logger"] == "fastinfer.server"]
    assert [line["request_id"] for line in errors] == ["mine-False", "mine-True"]
    assert all("the model broke" in line["message"] for line in errors)
    ends = [line for line in lines if line["message"] == "request"]
    assert [(line["status"], line["error"], line["finish_reason"]) for line in ends] == [
        (500, "server_error", "error"),
        (500, "server_error", "error"),
    ]


def test_other_packages_and_tracebacks() -> None:
    async def fail() -> None:
        logging.getLogger("uvicorn.error").warning("of %s", "uvicorn")
        logging.getLogger("uvicorn.error").info("not interesting")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("fastinfer.engine").exception("it failed")

    [uvicorn, ours] = [json.loads(line) for line in logged(fail)]
    assert (uvicorn["message"], uvicorn["logger"]) == ("of uvicorn", "uvicorn.error")
    assert ours["level"] == "error"
    assert ours["exception"].endswith("ValueError: two\nlines")


def test_text() -> None:
    async def requests() -> None:
        async with toy_client() as client:
            await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
            logging.getLogger("fastinfer.server").warning("draining")

    request, warning = logged(requests, "text")
    fields = f"status=200 duration_s=[0-9.e-]+ model={NAME} prompt_tokens=6 completion_tokens=3 finish_reason=length"
    assert re.fullmatch(rf"\S+Z INFO request request_id=mine method=POST path=/v1/chat/completions {fields}", request)
    assert re.fullmatch(r"\S+Z WARNING draining", warning)


def test_warnings_alone() -> None:
    async def requests() -> None:
        async with toy_client() as client:
            await client.post("/v1/chat/completions", json=CHAT)

    assert logged(requests, level="warning") == []


def test_a_reader_that_stops_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full and stays so: requests are answered, lines beyond a bound are dropped, and the end comes."""
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 50)
    monkeypatch.setattr(logs, "FLUSH_S", 0.05)
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")

    async def requests() -> None:
        async with toy_client() as client:
            for _ in range(100):
                logging.getLogger("fastinfer.server").warning("x" * 10_000)
            answer = await client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200

    with logging_to(stream, "json", "info"):
        asyncio.run(requests())
    # The thread that writes is a daemon; let it end before the pipe goes.
    data = bytearray()
    reader = threading.Thread(target=lambda: data.extend(iter_read(reading)))
    reader.start()
    for thread in threading.enumerate():
        if "_monitor" in thread.name:
            thread.join(20)
    stream.close()
    reader.join(20)
    assert 0 < data.count(b"\n") < 70


def iter_read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
