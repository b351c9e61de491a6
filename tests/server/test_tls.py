"""TLS: real clients over https, and mistakes in the files that are found before anything is loaded."""

import json
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("cryptography")

from support.certificates import write_certificate
from support.toy_server import toy_server

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 3, "ignore_eos": True}
# Checks command lines where torch cannot be imported, without a terminal; prints the message of each.
PROGRAM = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from fastinfer.cli.main import main

found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert main([*arguments, "--model", "nowhere"]) == 2
    found.append(stderr.getvalue())
print(json.dumps(found))
"""


def test_https(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with toy_server(ssl_certfile=certificate, ssl_keyfile=key) as (_, address):
        assert address.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(verify=context, base_url=address) as client:
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
            streamed = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{address}/health")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{address.replace('https', 'http')}/health")


def test_openai_client(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    certificate, key = write_certificate(tmp_path)
    with toy_server(ssl_certfile=certificate, ssl_keyfile=key, api_keys=("secret",)) as (_, address):
        http_client = httpx.Client(verify=ssl.create_default_context(cafile=certificate))
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", http_client=http_client)
        answer = client.chat.completions.create(model="toy", messages=CHAT["messages"], max_tokens=3, temperature=0)
        assert answer.choices[0].finish_reason in ("length", "stop")
        client.close()


def test_an_encrypted_key(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, password="sesame")
    settings = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_keyfile_password": "sesame"}
    with toy_server(**settings) as (server, address):
        assert httpx.get(f"{address}/health", verify=ssl.create_default_context(cafile=certificate)).status_code == 200
        assert "sesame" not in repr(server.config.app.state.server.config)


def test_mistakes_are_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path / "one")
    _, other_key = write_certificate(tmp_path / "other")
    _, encrypted = write_certificate(tmp_path / "encrypted", password="sesame")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    cases = {
        (certificate, None): "expected both or none",
        (None, key): "expected both or none",
        (str(tmp_path / "nowhere"), key): "--ssl-certfile: expected a file",
        (certificate, str(tmp_path)): "--ssl-keyfile: expected a file",
        (str(text), key): "expected a certificate and its key in PEM",
        (certificate, str(text)): "expected a certificate and its key in PEM",
        (key, certificate): "expected a certificate and its key in PEM",
        (certificate, other_key): "expected a certificate and its key in PEM",
        (certificate, encrypted): "FASTINFER_SSL_PASSWORD",
        (certificate, key): "model 'nowhere'",  # which is checked after them
    }
    lines = []
    for one, other in cases:
        line = ["serve", *(["--ssl-certfile", one] if one else []), *(["--ssl-keyfile", other] if other else [])]
        lines.append(line)
    monkeypatch.delenv("FASTINFER_SSL_PASSWORD", raising=False)
    assert_messages(lines, list(cases.values()))
    monkeypatch.setenv("FASTINFER_SSL_PASSWORD", "wrong")
    assert_messages([["serve", "--ssl-certfile", certificate, "--ssl-keyfile", encrypted]], ["expected a certificate"])


def assert_messages(lines: list[list[str]], expected: list[str]) -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert program.returncode == 0, program.stderr
    for line, message, found in zip(lines, expected, json.loads(program.stdout), strict=True):
        assert message in found, (line, found)
        assert len(found.splitlines()) == 1
