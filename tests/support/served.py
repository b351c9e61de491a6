"""`fastinfer serve` with the default model as a process, and what it answers to requests without a client package."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

KEY = "secret"
CONTEXT = 1024


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        url: its address; ``base`` is that of the interface.
        model, key: the model's name and the key that requests need.
        too_long: a text that does not fit into the context.
    """

    url: str
    model: str = "smollm2-135m-instruct"
    key: str = KEY
    too_long: str = "word " * (2 * CONTEXT)

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, **fields: Any) -> Any:
        """The answer to a request, as JSON."""
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = httpx.post(f"{self.base}{path}", json={"model": self.model, **fields}, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, question: str, **fields: Any) -> str:
        """The text of the answer to a question."""
        messages = [{"role": "user", "content": question}]
        answer = self.post("/chat/completions", messages=messages, temperature=0, **fields)
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def embedding(self, text: str) -> list[float]:
        vector: list[float] = self.post("/embeddings", input=text)["data"][0]["embedding"]
        return vector


@contextlib.contextmanager
def serve_default_model() -> Iterator[Served]:
    command = [sys.executable, "-m", "fastinfer", "serve", "--port", "0", "--context", str(CONTEXT)]
    environment = {**os.environ, "FASTINFER_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        address = next(line for line in process.stderr if "listening on" in line).split()[-1]
        deadline = time.monotonic() + 120
        while httpx.get(f"{address}/ready").status_code != 200:
            assert time.monotonic() < deadline, "the model is not loaded"
            time.sleep(0.1)
        yield Served(address)
    finally:
        process.terminate()
        process.communicate(timeout=30)
