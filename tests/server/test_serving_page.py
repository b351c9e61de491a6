"""Every command of docs/serving.md runs, the real program and the default model included."""

import contextlib
import json
import os
import re
import signal
import socket
import ssl
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
def served(command: str, folder: Path = ROOT) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server that a line of the page starts in a folder, on a free port; with TLS if there is a certificate."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assignments = dict(word.split("=", 1) for word in command.split() if re.match(r"[A-Z_]+=", word))
    arguments = [word for word in command.split() if "=" not in word]
    assert arguments[:2] == ["fastinfer", "serve"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")} | assignments
    program = [sys.executable, "-m", "fastinfer", *arguments[1:], "--port", str(port)]
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, cwd=folder)
    certificate = folder / "certificate.pem"
    verify = ssl.create_default_context(cafile=certificate) if certificate.exists() else False
    address = f"{'https' if verify else 'http'}://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/ready", verify=verify).status_code == 200:
                    break
            time.sleep(0.1)
        yield address, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_no_block_is_overlooked() -> None:
    assert (len(SERVE), len(CURL), len(PYTHON)) == (3, 3, 2)
    assert len(BLOCKS) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_the_first_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    *install, command = SERVE[0].strip().splitlines()
    assert [line.split()[0] for line in install] == ["git", "python", "pip", "pip", "pip"]
    for line in install[:4]:  # but for the comments, the same as on the first page
        assert line.partition("  #")[0] in (ROOT / "docs/getting-started.md").read_text()
    with served(command) as (address, _):
        for code in CURL[:2]:
            run = subprocess.run(["bash", "-ec", code.replace("http://127.0.0.1:8000", address)], capture_output=True)
            content = json.loads(run.stdout)["choices"][0]["message"]["content"]
            assert "Paris" in content or content in ("yes", "no")
        for code in PYTHON:
            exec(compile(code.replace("http://127.0.0.1:8000", address), "block", "exec"), {"__name__": "__main__"})
            assert "Paris" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_keys() -> None:
    with served(SERVE[1].strip()) as (address, _):
        body = {"prompt": "a", "max_tokens": 1, "temperature": 0}
        for key, status in (("secret", 200), ("more-secret", 200), ("other", 401)):
            answer = httpx.post(f"{address}/v1/completions", json=body, headers={"X-Api-Key": key}, timeout=60)
            assert answer.status_code == status
        # The stored answer to the holder of one of the keys is forgotten.
        code = CURL[2].replace("http://127.0.0.1:8000", address)
        run = subprocess.run(["bash", "-ec", code], capture_output=True)
        assert json.loads(run.stdout) == {"num_dropped": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_tls(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from support.certificates import write_certificate

    write_certificate(tmp_path)
    with served(SERVE[2].strip(), tmp_path) as (address, _):
        assert address.startswith("https")


def test_every_route_is_on_the_page(tmp_path: Path) -> None:
    from support.toy_server import toy_app

    rows = PAGE.partition("## Routes")[2].partition("\n\nFields")[0]
    for path in toy_app().openapi()["paths"]:
        assert f"`{path.replace('{name}', '{id}')}`" in rows or path in ("/ping",), path
