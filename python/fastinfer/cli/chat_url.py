"""Answers of ``fastinfer chat --url``, from an OpenAI-compatible server."""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Any

from fastinfer.cli.checks import sampling_fields
from fastinfer.cli.conversation import Piece
from fastinfer.client.answer_stream import list_models, stream_deltas
from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import ServerError

# While nothing arrives an empty piece is yielded this often, so that the chat notices Ctrl-C.
POLL_S = 0.1


@dataclass(frozen=True)
class RemoteSession:
    """A model of a server, and how it answers.

    Attributes:
        endpoint: the server.
        fields: fields of every request.
    """

    endpoint: Endpoint
    fields: dict[str, Any]

    @classmethod
    def connect(cls, args: argparse.Namespace) -> "RemoteSession":
        """Find the model. Sampling parameters that the arguments do not give are up to the server.

        Raises:
            FastinferError: the server cannot be reached, refuses the key, or lists no model.
        """
        endpoint = Endpoint.parse(args.url, args.api_key)
        model = args.model or asyncio.run(list_models(endpoint))[0]
        return cls(endpoint, {"model": model, **_request_fields(args)})

    def chat(self, messages: list[dict[str, str]]) -> Generator[Piece, None, None]:
        """Answer a conversation in pieces of text, see :func:`stream_deltas`."""
        loop = asyncio.new_event_loop()
        deltas = stream_deltas(self.endpoint, {**self.fields, "messages": messages})
        try:
            while True:
                coming = loop.create_task(_next(deltas))
                while not loop.run_until_complete(asyncio.wait([coming], timeout=POLL_S))[0]:
                    yield Piece("")
                if (delta := coming.result()) is None:
                    return
                yield from _pieces(delta)
        finally:
            coming.cancel()
            loop.run_until_complete(asyncio.wait([coming]))
            loop.run_until_complete(deltas.aclose())
            loop.close()


async def _next(deltas: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(deltas, None)


def _pieces(delta: dict[str, Any]) -> Generator[Piece, None, None]:
    if reasoning := _text(delta.get("reasoning_content") or delta.get("reasoning")):
        yield Piece(reasoning, is_reasoning=True)
    if text := _text(delta.get("content") or delta.get("refusal")):
        yield Piece(text)


def _text(content: object) -> str:
    """Return the text of a field, of which some servers make a list of parts; parts of other kinds are left out."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    if isinstance(content, str | None):
        return content or ""
    raise ServerError(f"expected text in the server's answer, got {json.dumps(content)[:80]}")


def _request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters under the names of the API, vLLM's where OpenAI has none."""
    fields = sampling_fields(args)
    structured = fields.pop("structured_outputs")
    if structured is None:
        return fields
    if structured.json is not None:
        json_schema = {"name": "answer", "schema": json.loads(structured.json), "strict": True}
        return fields | {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    constraint = {"regex": structured.regex, "choice": structured.choice}
    return fields | {"structured_outputs": {name: value for name, value in constraint.items() if value is not None}}
