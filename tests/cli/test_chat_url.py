"""``fastinfer chat --url``: the same chat, answered by a server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_openai_server import FakeOpenAIServer

from fastinfer.cli.main import main

Captured = pytest.CaptureFixture[str]
Typed = Callable[..., None]


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTINFER_API_KEY", raising=False)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Sets what the user types, line by line."""

    def set_lines(*lines: str) -> None:
        remaining = list(lines)

        def read(prompt: str) -> str:
            if not remaining:
                raise EOFError
            return remaining.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return set_lines


def test_conversation(server: FakeOpenAIServer, typed: Typed, capsys: Captured) -> None:
    typed("Hello", "And?", "/reset", "Again")
    assert main(["chat", "--url", server.url, "--system", "Be brief."]) == 0
    assert capsys.readouterr() == ("The sky is blue.\n" * 3, "")
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": "The sky is blue."}
    assert [request["messages"] for request in server.requests] == [
        [system, hello],
        [system, hello, answer, {"role": "user", "content": "And?"}],
        [system, {"role": "user", "content": "Again"}],
    ]


def test_what_is_not_given_is_up_to_the_server(server: FakeOpenAIServer, typed: Typed) -> None:
    typed("Hello")
    assert main(["chat", "--url", server.url]) == 0
    assert server.requests[0].keys() == {"model", "messages", "stream"}
    assert server.requests[0]["model"] == "fake-model"  # the first that it lists


def test_parameters_are_sent(server: FakeOpenAIServer, typed: Typed, tmp_path: Path) -> None:
    typed("Hello")
    options = "--model mine --temperature 0 --max-tokens 5 --stop a --stop b --top-k 3 --seed 1"
    assert main(["chat", "--url", server.url, *options.split()]) == 0
    expected = {"model": "mine", "temperature": 0, "max_tokens": 5, "stop": ["a", "b"], "top_k": 3, "seed": 1}
    assert expected.items() <= server.requests[0].items()
    assert "/v1/models" not in server.paths


def test_structured_output_is_sent(server: FakeOpenAIServer, typed: Typed, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for options in (["--json-schema", str(tmp_path / "schema.json")], ["--regex", "a+"], ["--choice", "a"]):
        typed("Hello")
        assert main(["chat", "--url", server.url, *options]) == 0
    by_schema, by_regex, by_choice = server.requests
    assert by_schema["response_format"]["json_schema"]["schema"] == schema
    assert by_regex["structured_outputs"] == {"regex": "a+"}
    assert by_choice["structured_outputs"] == {"choice": ["a"]}


def test_reasoning_is_shown_but_not_sent_back(typed: Typed, capsys: Captured) -> None:
    typed("Hello", "And?")
    with FakeOpenAIServer(reasoning="Let me think.") as server:
        assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Let me think.\n\nThe sky is blue.\n" * 2
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "The sky is blue."}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "thinking", "thinking": []}, {"type": "text", "text": "The sky"}, {"type": "text"}], "The sky\n"),
        ([{"type": "text", "text": 5}], ""),
        (5, ""),
    ],
)
def test_content_that_is_no_string(content: object, shown: str, typed: Typed, capsys: Captured) -> None:
    typed("Hello")
    with FakeOpenAIServer(pieces=(content,)) as server:  # type: ignore[arg-type]
        assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == shown
    assert err == ("" if shown else "fastinfer: error: expected text in the server's answer, got 5\n")


def test_line_that_is_not_utf_8_does_not_end_the_chat(server: FakeOpenAIServer) -> None:
    command = [sys.executable, "-m", "fastinfer", "chat", "--url", server.url]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(command, input=b"hi \xff\nHello\n", capture_output=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout) == (0, b"The sky is blue.\n")
    assert result.stderr == b"fastinfer: error: expected a line in UTF-8, got b'hi \\xff'\n"
    assert [request["messages"][-1]["content"] for request in server.requests] == ["Hello"]


@pytest.mark.parametrize("in_environment", [False, True])
def test_key(typed: Typed, in_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    typed("Hello")
    options = [] if in_environment else ["--api-key", "right"]
    if in_environment:
        monkeypatch.setenv("FASTINFER_API_KEY", " right, other")
    with FakeOpenAIServer(api_key="right") as server:
        assert main(["chat", "--url", server.url, *options]) == 0
    assert len(server.requests) == 1


def test_wrong_key_ends_the_program(typed: Typed, capsys: Captured) -> None:
    with FakeOpenAIServer(api_key="right") as server:
        assert main(["chat", "--url", server.url, "--api-key", "wrong"]) == 2
    assert capsys.readouterr().err == "fastinfer: error: the server answered 401: wrong key\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"status": 400}, "the server answered 400: no; /reset starts over"),
        ({"status": 503}, "the server answered 503: no"),
        ({"error_after": 1}, "the server's stream failed: it broke"),
    ],
)
def test_failed_answer_is_no_part_of_the_conversation(
    settings: dict[str, int], message: str, typed: Typed, capsys: Captured
) -> None:
    typed("Hello", "Again")
    with FakeOpenAIServer(**settings) as server:  # type: ignore[arg-type]
        assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().err == f"fastinfer: error: {message}\n" * 2
    assert [len(request["messages"]) for request in server.requests] == [1, 1]


def test_interrupt_stops_an_answer_that_does_not_come(typed: Typed, capsys: Captured) -> None:
    """The server is told, too, and the chat goes on."""
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while not server.requests:
            time.sleep(0.01)
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    typed("Hello", "And?")
    with FakeOpenAIServer(before_piece_s=0.3) as server:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert main(["chat", "--url", server.url]) == 0
        thread.join()
    assert capsys.readouterr().out == " [stopped]\nThe sky is blue.\n"
    assert server.num_abandoned == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--url localhost:8000", "url: expected http://HOST:PORT"),
        ("--url http://x --device cpu", "so device has no effect"),
        ("--url http://x --adapter folder", "so adapter has no effect"),
        ("--url http://x --threads 2", "so threads has no effect"),
        ("--url http://x --temperature -1", "temperature must be"),
        ("--api-key x", "--api-key: expected --url"),
    ],
)
def test_mistakes(options: str, message: str, capsys: Captured) -> None:
    assert main(["chat", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_no_torch_is_needed(server: FakeOpenAIServer) -> None:
    program = "import sys; sys.modules['torch'] = None; from fastinfer.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "chat", "--url", server.url]
    result = subprocess.run(command, input="Hello\n", capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "The sky is blue.\n", "")
