"""Every command of docs/serving.md runs, the real program and the default model included."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs/serving.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SERVE = [code for kind, code in BLOCKS if kind == "bash" and "fastinfer serve" in code]
CURL = [code for kind, code in BLOCKS if kind == "bash" and "curl" in code]
PYTHON = [code for kind, code in BLOCKS if kind == "python"]


@contextlib.contextmanager
def served(command: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """What a line of the page starts, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assignments = dict(word.split("=", 1) for word in command.split() if re.match(r"[A-Z_]+=", word))
    arguments = [word for word in command.split() if "=" not in word]
    assert arguments[:2] == ["fastinfer", "serve"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")} | assignments
    program = [sys.executable, "-m", "fastinfer", *arguments[1:], "--port", str(port)]
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/ready").status_code == 200:
                    break
            time.sleep(0.1)
        yield address, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_no_block_is_overlooked() -> None:
    assert (len(SERVE), len(CURL), len(PYTHON)) == (2, 2, 1)
    assert len(BLOCKS) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_the_first_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install, command = SERVE[0].strip().splitlines()
    assert install.startswith("pip install 'fastinfer[server]'")
    with served(command) as (address, _):
        for code in CURL:
            run = subprocess.run(["bash", "-ec", code.replace("http://127.0.0.1:8000", address)], capture_output=True)
            content = json.loads(run.stdout)["choices"][0]["message"]["content"]
            assert "Paris" in content or content in ("yes", "no")
        exec(compile(PYTHON[0].replace("http://127.0.0.1:8000", address), "block", "exec"), {"__name__": "__main__"})
        assert "Paris" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_keys() -> None:
    with served(SERVE[1].strip()) as (address, _):
        body = {"prompt": "a", "max_tokens": 1}
        for key, status in (("secret", 200), ("more-secret", 200), ("other", 401)):
            answer = httpx.post(f"{address}/v1/completions", json=body, headers={"X-Api-Key": key}, timeout=60)
            assert answer.status_code == status


def test_every_route_is_on_the_page(tmp_path: Path) -> None:
    from support.toy_server import toy_app

    rows = PAGE.partition("## Routes")[2].partition("\n\nFields")[0]
    for path in toy_app().openapi()["paths"]:
        assert f"`{path.replace('{name}', '{id}')}`" in rows or path in ("/ping",), path
