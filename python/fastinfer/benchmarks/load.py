"""Load generator: a number of streams at once on an OpenAI-compatible server.

During a run it only notes when which bytes arrived; everything is parsed afterwards. The CPU time that it takes is
measured with every run, because a generator that is short of time measures itself.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastinfer.benchmarks.prompts import COPY_HEAVY, OTHERS, SYSTEM
from fastinfer.benchmarks.served_answer import Recording, ServedAnswer
from fastinfer.client.answers import REQUEST_STATUS
from fastinfer.client.connection import Connection
from fastinfer.client.endpoint import Endpoint

# Common ones, most of them one token each.
WORDS = sorted({word for text in (*COPY_HEAVY, *OTHERS, SYSTEM) for word in re.findall(r"\b[a-z]+\b", text)})

# What not every server takes, in the order in which it is tried: fields of the request, and of its stream options.
Variant = tuple[dict[str, Any], dict[str, Any]]
VARIANTS: tuple[Variant, ...] = (
    ({"ignore_eos": True}, {"continuous_usage_stats": True}),
    ({"ignore_eos": True}, {}),
    ({}, {"continuous_usage_stats": True}),
    ({}, {}),
)


class RequestBodies:
    """Chats of equal length, no two of which share a prefix that a cache could find.

    Args:
        model: name of the model.
        prompt_words: number of random words in the user's message.
        new_tokens: number of tokens to generate.
        variant: one of ``VARIANTS``.
    """

    def __init__(self, model: str, prompt_words: int, new_tokens: int, variant: Variant) -> None:
        self._rng = random.Random(0)
        self._prompt_words = prompt_words
        fields, stream_options = variant
        self._fields = {
            "model": model,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, **stream_options},
            **fields,
        }

    def __iter__(self) -> Iterator[bytes]:
        """Return an endless iterator over bodies."""
        while True:
            text = " ".join(self._rng.choices(WORDS, k=self._prompt_words))
            yield json.dumps({**self._fields, "messages": [{"role": "user", "content": text}]}).encode()


@dataclass(frozen=True)
class Run:
    """Result of a run; ``seconds`` lasts from the first request to the end of the last answer.

    Attributes:
        seconds: duration.
        generator_s: CPU seconds of this process meanwhile.
        answers: all answers.
    """

    seconds: float
    generator_s: float
    answers: list[ServedAnswer]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.new_tokens for answer in self.answers) / self.seconds

    @property
    def generator_cores(self) -> float:
        """How much of a core this process took."""
        return self.generator_s / self.seconds


def find_variant(endpoint: Endpoint, model: str) -> Variant:
    """Return the first of ``VARIANTS`` that the server takes.

    Raises:
        FastinferError: it takes none, or fails.
    """
    for variant in VARIANTS:
        body = next(iter(RequestBodies(model, 1, 2, variant)))
        [recording] = asyncio.run(_drive(endpoint, [[body]]))
        if recording.status not in REQUEST_STATUS:
            break
    ServedAnswer.parse(recording)
    return variant


def run_streams(endpoint: Endpoint, bodies: Iterator[bytes], streams: int, requests: int) -> Run:
    """Run streams at once, each of which sends its requests one after the other.

    Raises:
        FastinferError: a request failed.
    """
    queues = [[next(bodies) for _ in range(requests)] for _ in range(streams)]
    cpu_before = time.process_time()
    recordings = asyncio.run(_drive(endpoint, queues))
    generator_s = time.process_time() - cpu_before
    seconds = max(recording.end_s for recording in recordings) - min(recording.sent_s for recording in recordings)
    return Run(seconds, generator_s, [ServedAnswer.parse(recording) for recording in recordings])


async def _drive(endpoint: Endpoint, queues: list[list[bytes]]) -> list[Recording]:
    connections = await asyncio.gather(*(Connection.open(endpoint) for _ in queues))
    streams = [_stream(endpoint, *pair) for pair in zip(connections, queues, strict=True)]
    return [recording for recordings in await asyncio.gather(*streams) for recording in recordings]


async def _stream(endpoint: Endpoint, connection: Connection, bodies: list[bytes]) -> list[Recording]:
    recordings = []
    try:
        for body in bodies:
            if not connection.is_open:  # the server does not keep connections
                connection = await Connection.open(endpoint)
            recording = Recording(time.perf_counter())
            recordings.append(recording)

            def record(data: bytes, recording: Recording = recording) -> None:
                recording.reads.append((time.perf_counter(), data))

            recording.status = await connection.request("POST", "/chat/completions", body, record)
            recording.end_s = time.perf_counter()
            if recording.status != 200:
                break
    finally:
        connection.close()
    return recordings
