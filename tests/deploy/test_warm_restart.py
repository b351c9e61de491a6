"""A server that keeps its KV cache on disk, and is started again."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.paths import ROOT
from support.proxies import free_port


@contextlib.contextmanager
def serve(model: Path, *options: str) -> Iterator[httpx.Client]:
    """Run ``fastinfer serve``; it must end with 0 after SIGTERM."""
    port = free_port()
    command = [sys.executable, "-m", "fastinfer", "serve", "--model", str(model), "--port", str(port), *options]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT / "python")})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_prompt_is_found_after_a_restart(model_path: Path, tmp_path: Path) -> None:
    """The text is the same, and the prompt is not computed again."""
    prompt = " ".join(f"Item {number} costs {number * 7 % 90} euros." for number in range(60))
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    options = ("--kv-offloading-dir", str(tmp_path), "--served-model-name", "m")
    answers = []
    for _ in range(2):
        with serve(model_path, *options) as client:
            answers.append(client.post("/v1/completions", json=body).json())
    texts = [answer["choices"][0]["text"] for answer in answers]
    lengths = {answer["usage"]["prompt_tokens"] for answer in answers}
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert texts[0] == texts[1] != ""
    assert cached[0] == 0
    assert cached[1] >= lengths.pop() - 32, "all but the last block"
