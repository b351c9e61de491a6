"""An OpenAI-compatible server without a model: it streams given pieces, and remembers what it was asked."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeOpenAIServer:
    """Serves on 127.0.0.1 in a thread of its own, as a context manager.

    Attributes:
        pieces: texts of the answer's deltas; each is one token.
        refused_fields: fields that get status 400.
        api_key: key that requests must have.
        gives_usage: whether ``stream_options`` is obeyed.
        before_piece_s: seconds to wait before each piece.
        status: status of every answer.
        cut_after: number of pieces after which the connection is closed; ``None`` for a whole answer.
        error_after: number of pieces after which a frame reports an error.
        reasoning: text that is streamed as reasoning first, one token.
        models: names under /models.
        states_length: whether the head of an answer says where it ends; otherwise it ends with the connection.
        requests: bodies of the chats and completions so far.
        paths: paths of all requests so far.
        num_abandoned: requests whose client closed the connection early.
    """

    pieces: tuple[str, ...] = ("The ", "sky ", "is ", "blue.")
    refused_fields: tuple[str, ...] = ()
    api_key: str | None = None
    gives_usage: bool = True
    before_piece_s: float = 0.0
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    reasoning: str = ""
    models: tuple[str, ...] = ("fake-model", "another")
    states_length: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_abandoned: int = 0
    port: int = 0

    def __enter__(self) -> "FakeOpenAIServer":
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _stop(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer(reader, writer)
                if not self.states_length:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = lines[0].split()
        self.paths.append(path)
        if self.api_key is not None and f"Authorization: Bearer {self.api_key}" not in lines:
            self._write_json(writer, 401, {"error": {"message": "wrong key"}})
        elif method == "GET" and path == "/ready":
            self._write_json(writer, 200, {"status": "ok"})
        elif method == "GET" and path.endswith("/models"):
            self._write_json(writer, 200, {"object": "list", "data": [{"id": name} for name in self.models]})
        elif method == "POST" and path.endswith("/completions"):
            await self._stream(json.loads(body), reader, writer)
        else:
            self._write_json(writer, 404, {"error": {"message": f"no such path: {path}"}})

    async def _stream(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.requests.append(request)
        refused = [name for name in self.refused_fields if name in request]
        if refused or self.status != 200:
            message = f"unknown field: {refused[0]}" if refused else "no"
            self._write_json(writer, 400 if refused else self.status, {"error": {"message": message}})
            return
        chunked = b"Transfer-Encoding: chunked\r\n" if self.states_length else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%b\r\n" % chunked)
        async for chunk in self._chunks(request):
            data = chunk if isinstance(chunk, bytes) else b"data: %b\n\n" % json.dumps(chunk).encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            with contextlib.suppress(ConnectionError):  # a client that leaves with bytes unread resets the connection
                await writer.drain()
            if reader.at_eof() or writer.is_closing():
                self.num_abandoned += 1
                raise ConnectionError
        writer.write(b"0\r\n\r\n" if chunked else b"")

    async def _chunks(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any] | bytes]:
        def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
            part = {"delta": delta} if "messages" in request else {"text": delta.get("content", "")}
            return {"choices": [{"index": 0, **part, "finish_reason": finish_reason}]}

        yield chunk({"role": "assistant", "content": ""})
        yield b": ping\n\n"
        if self.reasoning:
            yield chunk({"reasoning_content": self.reasoning})
        for index, piece in enumerate(self.pieces):
            if index == self.cut_after:
                raise ConnectionError
            if index == self.error_after:
                yield {"error": {"message": "it broke"}}
                yield b"data: [DONE]\n\n"
                return
            await asyncio.sleep(self.before_piece_s)
            yield chunk({"content": piece})
        yield chunk({}, "stop")
        if self.gives_usage and request.get("stream_options", {}).get("include_usage"):
            num_tokens = len(self.pieces) + bool(self.reasoning)
            yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}}
        yield b"data: [DONE]\n\n"

    def _write_json(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        length = b"Content-Length: %d\r\n" % len(body) if self.states_length else b""
        writer.write(b"HTTP/1.1 %d X\r\n%b\r\n%b" % (status, length, body))
