"""Addresses on which nobody can listen."""

import socket
import threading
from pathlib import Path

import pytest
from support.toy_server import toy_server

from fastinfer import AsyncEngine
from fastinfer.cli import serve
from fastinfer.cli.main import main
from fastinfer.server import run as run_module
from fastinfer.server.config import ServerConfig

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


@pytest.mark.parametrize("command", COMMANDS)
def test_paths_at_which_there_can_be_no_socket(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(serve, "load", lambda args: pytest.fail("the model was loaded"))
    arguments = COMMANDS[command] + ([] if command == "router" else ["--model", str(tmp_path)])
    for path, message in (
        (tmp_path / "nothing" / "s.sock", "expected a path in a folder that can be written to, got"),
        (tmp_path / "config.json", "expected the path of a socket, or of nothing, got another file,"),
    ):
        assert main([*arguments, "--uds", str(path)]) == 2
        assert capsys.readouterr().err == f"fastinfer: error: --uds: {message} '{path}'\n"


def test_a_socket_that_is_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with toy_server(uds=str(path)) as (_, address), socket.socket(socket.AF_UNIX) as client:
        assert address == f"unix:{path}"
        client.connect(str(path))


def test_an_error_of_the_start_ends_the_process_though_the_model_is_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At an ordinary end the interpreter would kill the thread that loads, which aborts the process."""
    codes, is_over = [], threading.Event()

    def load() -> AsyncEngine:
        is_over.wait(60)
        raise AssertionError

    monkeypatch.setattr(run_module, "end_process", codes.append)
    path = str(tmp_path / ("s" * 200))
    assert run_module.run(ServerConfig(model_names=("toy",), uds=path), load) == 1
    is_over.set()
    assert codes == [2]
    assert f"the server could not start: --uds: '{path[:40]}" in caplog.text
    assert "Traceback" not in caplog.text
