"""An OpenAI server whose answers are written by the test, and which serves the chat page."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fastinfer.server.page import load_page

CUT = "cut"  # a step of an answer: the connection is closed
Step = dict[str, Any] | float | str
Answer = Callable[[dict[str, Any]], Iterable[Step]]


def text_answer(text: str, piece: int = 20, pause: float = 0.0, **usage: int) -> list[Step]:
    """The steps of an answer: deltas of some characters, then the end and the usage."""
    steps: list[Step] = []
    for start in range(0, len(text), piece):
        steps += [{"delta": {"content": text[start : start + piece]}}, pause]
    return [*steps, *the_end(**usage)]


def the_end(reason: str = "stop", prompt_tokens: int = 100, completion_tokens: int = 50) -> list[Step]:
    return [
        {"delta": {}, "finish_reason": reason},
        {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}},
    ]


class FakeOpenAI:
    """The server, on a port of its own.

    Attributes:
        answer: makes the steps of an answer from a request: deltas, perhaps with a finish_reason or a usage; a usage;
            an error; pauses in seconds; and ``CUT``.
        requests: the requests for answers so far.
        num_disconnects: answers that the client did not take to their end.
        api_key: what requests must have, or ``None``.
        limit: longest context of the first model, or ``None`` while it is not known.
        modalities: what the first model reads, or ``None`` while it is not known.
        refusals: messages of the errors 503 that the next requests get, one each.
    """

    def __init__(self, port: int = 0) -> None:
        self.answer: Answer = lambda request: text_answer("Hello.")
        self.requests: list[dict[str, Any]] = []
        self.num_disconnects = 0
        self.api_key: str | None = None
        self.limit: int | None = 2048
        self.modalities: list[str] | None = ["text"]
        self.refusals: list[str] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                match self.path:
                    case "/":
                        page = load_page()
                        self._send(200, page.body, page.headers)
                    case "/health":
                        self._send(200, b"")
                    case "/v1/models":
                        if not self._is_refused():
                            first = {"max_model_len": owner.limit, "input_modalities": owner.modalities}
                            models = [{"id": "toy-135m", **first}, {"id": "my-lora"}]
                            self._send(200, json.dumps({"object": "list", "data": models}).encode())
                    case _:
                        self._send(404, b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self._is_refused():
                    return
                if owner.refusals:
                    error = {"message": owner.refusals.pop(), "type": "overloaded_error", "param": None, "code": None}
                    headers = {"Content-Type": "application/json", "Retry-After": "1"}
                    self._send(503, json.dumps({"error": error}).encode(), headers)
                    return
                owner.requests.append(body)
                steps = owner.answer(body)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    for step in steps:
                        if step == CUT:
                            return
                        if isinstance(step, float):
                            time.sleep(step)
                            continue
                        assert isinstance(step, dict)
                        chunk = step if "error" in step else _chunk(step)
                        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                    self.wfile.write(b"data: [DONE]\n\n")
                except (BrokenPipeError, ConnectionResetError):
                    owner.num_disconnects += 1

            def _is_refused(self) -> bool:
                if owner.api_key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
                    return False
                error = {"message": "wrong API key", "type": "invalid_request_error", "param": None, "code": None}
                self._send(401, json.dumps({"error": error}).encode())
                return True

            def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in (headers or {"Content-Type": "application/json"}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _chunk(step: dict[str, Any]) -> dict[str, Any]:
    usage = {"usage": step["usage"]} if "usage" in step else {}
    choice = {name: value for name, value in step.items() if name != "usage"}
    return {**usage, "choices": [{"index": 0, "finish_reason": None, **choice}] if choice else []}
