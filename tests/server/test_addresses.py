"""Addresses on which nobody can listen."""

import socket
from pathlib import Path

import pytest

from fastinfer.cli import serve
from fastinfer.cli.main import main

COMMANDS = {
    "serve": ["serve"],
    "replicas": ["serve", "--data-parallel-size", "2", "--device", "cpu"],
    "router": ["router", "http://127.0.0.1:1"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_option_is_named_before_anything_is_loaded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(serve, "load", lambda args: pytest.fail("the model was loaded"))
    arguments = COMMANDS[command] + ([] if command == "router" else ["--model", str(tmp_path)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main([*arguments, "--port", port]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastinfer: error: --port: ")
    assert port in error
    assert "address already in use" in error
    assert len(error.splitlines()) == 1
    assert main([*arguments, "--host", "192.0.2.1", "--port", "0"]) == 2  # an address of documentations
    error = capsys.readouterr().err
    assert error.startswith("fastinfer: error: --host: ")
    assert "192.0.2.1" in error
