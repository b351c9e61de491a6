"""`serve run` with the configuration of deploy/ray: the engine dies in the midst of a stream."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.manifests import DEPLOY

pytest.importorskip("ray.serve", reason="make ray installs it")
yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.slow

PORT = 8777
URL = f"http://127.0.0.1:{PORT}"
ENGINE = "ray::ServeReplica:fastinfer:Engine"


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def engines(root: int) -> list[int]:
    """The engines among the descendants of a process."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and (path / "cmdline").read_bytes().startswith(ENGINE.encode()):
                pid = ancestor = int(path.name)
                while ancestor not in (0, root):
                    ancestor = parent_of(ancestor)
                if ancestor == root:
                    found.append(pid)
        except OSError:  # it has ended
            continue
    return found


def is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/v1/models").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def serve(model_path: Path) -> Iterator[int]:
    """The process id of `serve run`."""
    config = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    config["http_options"]["port"] = PORT
    [application] = config["applications"]
    application["args"] |= {"model": str(model_path), "threads": 1, "context": 1024, "response-cache": "off"}
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # sockets need short paths
        path = Path(folder, "serve.yaml")
        path.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
        command = [str(Path(sys.executable).with_name("serve")), "run", str(path)]
        with (Path(folder, "log")).open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                wait_until(lambda: is_ready() or process.poll() is not None)
                assert process.poll() is None, Path(folder, "log").read_text()
                yield process.pid
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(120)


def test_a_stream_goes_on_on_the_replacement_of_its_engine(serve: int) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a long story."}], "seed": 1, "ignore_eos": True}
    body |= {"max_tokens": 100}
    answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert len(answer.headers.get_list("x-request-id")) == 1
    [engine] = engines(serve)
    text, is_killed = "", False
    with httpx.stream("POST", f"{URL}/v1/chat/completions", json={**body, "stream": True}, timeout=120) as stream:
        for line in filter(None, stream.iter_lines()):
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if text and not is_killed:
                os.kill(engine, signal.SIGKILL)
                is_killed = True
    assert is_killed
    assert line == "data: [DONE]"
    assert text == answer.json()["choices"][0]["message"]["content"]
    assert engines(serve) not in ([], [engine])
