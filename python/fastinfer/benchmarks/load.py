"""Load generator: a number of streams at once on an OpenAI-compatible server.

During a run it only notes when which bytes arrived; everything is parsed afterwards. The CPU time that it takes is
measured with every run, because a generator that is short of time measures itself.
"""

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass
from typing import Any

from fastinfer.benchmarks.prompts import COPY_HEAVY, OTHERS, SYSTEM
from fastinfer.benchmarks.served_answer import Recording, ServedAnswer
from fastinfer.client.answers import check_status
from fastinfer.client.connection import Connection
from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import RequestError

# Common ones, most of them one token each.
WORDS = sorted({word for text in (*COPY_HEAVY, *OTHERS, SYSTEM) for word in re.findall(r"\b[a-z]+\b", text)})


class Requests:
    """Requests of equal length, no two of which share a prefix that a cache could find.

    Args:
        model: name of the model.
        prompt_words: number of random words in the user's message or prompt.
        new_tokens: number of tokens to generate.
        ignore_eos: whether they ask for all of these tokens, whatever the model says.
        is_chat: whether the requests are chats; completions otherwise.

    Attributes:
        path: where they are sent.
    """

    def __init__(
        self, model: str, prompt_words: int, new_tokens: int, *, ignore_eos: bool, is_chat: bool = True
    ) -> None:
        self.path = "/chat/completions" if is_chat else "/completions"
        self._is_chat = is_chat
        self._rng = random.Random()  # without a seed: the server may remember an earlier benchmark's prompts
        self._prompt_words = prompt_words
        self._fields: dict[str, Any] = {
            "model": model,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            # Not continuous_usage_stats: few clients ask for that, and with it a server takes longer for each token.
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._fields["ignore_eos"] = True

    def next_body(self) -> bytes:
        """Return the body of another request."""
        text = " ".join(self._rng.choices(WORDS, k=self._prompt_words))
        prompt = {"messages": [{"role": "user", "content": text}]} if self._is_chat else {"prompt": text}
        return json.dumps({**self._fields, **prompt}).encode()


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
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def generator_cores(self) -> float:
        """Share of a core that this process took."""
        return self.generator_s / self.seconds


def knows_ignore_eos(endpoint: Endpoint, model: str, *, is_chat: bool) -> bool:
    """Return whether a server takes requests with ``ignore_eos``, which OpenAI's API does not have.

    Raises:
        FastinferError: it takes no requests without it either, or fails.
    """
    for ignore_eos in (True, False):
        requests = Requests(model, 1, 2, ignore_eos=ignore_eos, is_chat=is_chat)
        try:
            [recording] = asyncio.run(_drive(endpoint, requests.path, [[requests.next_body()]]))
            break
        except RequestError:
            if not ignore_eos:
                raise
    ServedAnswer.parse(recording)
    return ignore_eos


def run_streams(endpoint: Endpoint, requests: Requests, num_streams: int, num_requests: int) -> Run:
    """Run streams at once, each of which sends ``num_requests`` requests one after the other.

    Raises:
        FastinferError: a request failed; the other streams have been closed.
    """
    queues = [[requests.next_body() for _ in range(num_requests)] for _ in range(num_streams)]
    cpu_before = time.process_time()
    recordings = asyncio.run(_drive(endpoint, requests.path, queues))
    generator_s = time.process_time() - cpu_before
    seconds = max(recording.end_s for recording in recordings) - min(recording.sent_s for recording in recordings)
    return Run(seconds, generator_s, [ServedAnswer.parse(recording) for recording in recordings])


async def _drive(endpoint: Endpoint, path: str, queues: list[list[bytes]]) -> list[Recording]:
    """Connect all streams first, so that no time to a first token contains a handshake; then run them."""
    connections = await asyncio.gather(*(Connection.open(endpoint) for _ in queues))
    streams = [_stream(endpoint, path, *pair) for pair in zip(connections, queues, strict=True)]
    return [recording for recordings in await asyncio.gather(*streams) for recording in recordings]


async def _stream(endpoint: Endpoint, path: str, connection: Connection, bodies: list[bytes]) -> list[Recording]:
    recordings = []
    try:
        for body in bodies:
            if not connection.is_open:  # the server does not keep connections
                connection = await Connection.open(endpoint)
            recording = Recording(time.perf_counter())
            recordings.append(recording)
            reads = recording.reads

            def record(data: bytes, reads: list[tuple[float, bytes]] = reads) -> None:
                reads.append((time.perf_counter(), data))

            status = await connection.request("POST", path, body, record)
            recording.end_s = time.perf_counter()
            check_status(status, b"".join(data for _, data in reads))
    finally:
        connection.close()
    return recordings
