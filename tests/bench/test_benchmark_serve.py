"""``fastinfer bench serve``: what it counts, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_openai_server import FakeOpenAIServer

from fastinfer.benchmarks.load import Requests, knows_ignore_eos, run_streams
from fastinfer.benchmarks.serve import Level
from fastinfer.benchmarks.served_answer import Recording, ServedAnswer
from fastinfer.cli.main import main
from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import RequestError, ServerError


def chunk(text: str | None, num_tokens: int | None = None) -> bytes:
    fields: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "delta": {"content": text}}]}
    if num_tokens is not None:
        fields["usage"] = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    return b"data: %b\n\n" % json.dumps(fields).encode()


DONE = b"data: [DONE]\n\n"


def recording(*reads: bytes) -> Recording:
    """An answer whose reads arrive at 11, 12, ... after a request at 10 s."""
    times = [(11.0 + index, data) for index, data in enumerate(reads)]
    return Recording(10.0, times, 11.0 + len(reads))


def test_counts_at_the_end() -> None:
    answer = ServedAnswer.parse(recording(chunk(""), chunk("a"), chunk("b"), chunk("c"), chunk(None, 3), DONE))
    assert (answer.prompt_tokens, answer.new_tokens, answer.moments) == (7, 3, [12.0, 13.0, 14.0])
    assert (answer.first_token_s, answer.gaps_s, answer.per_token_s) == (2.0, [1.0, 1.0], 1.0)


def test_outputs_are_reads_with_text() -> None:
    """One read brings two chunks, another none with text; the counts come with every chunk."""
    reads = [chunk("", 0), chunk("ab", 2), chunk("", 3), chunk("c", 4) + chunk("d", 5), chunk(None, 5) + DONE]
    answer = ServedAnswer.parse(recording(*reads))
    assert (answer.new_tokens, answer.moments, answer.per_token_s) == (5, [12.0, 14.0], 0.5)


def test_chunks_may_be_cut_anywhere() -> None:
    stream = b"".join([chunk("a"), chunk("b"), chunk(None, 2), DONE])
    answer = ServedAnswer.parse(recording(*(stream[at : at + 10] for at in range(0, len(stream), 10))))
    assert (answer.new_tokens, len(answer.moments)) == (2, 2)
    assert answer.moments[0] == 11.0 + (len(chunk("a")) - 1) // 10


def test_one_token_has_no_pace() -> None:
    answer = ServedAnswer.parse(recording(chunk("a"), chunk(None, 1) + DONE))
    assert (answer.gaps_s, answer.per_token_s) == ([], None)
    answer = ServedAnswer.parse(recording(chunk("a"), chunk("b"), chunk(None, 1) + DONE))
    assert (answer.gaps_s, answer.per_token_s) == ([1.0], None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (recording(chunk("a"), chunk(None, 1)), r"without \[DONE\]"),
        (recording(chunk("a"), DONE), "expected the token counts"),
        (recording(chunk(""), chunk(None, 0), DONE), "expected text"),
        (recording(b'data: {"error": {"message": "it broke"}}\n\n', DONE), "it broke"),
    ],
)
def test_answers_that_cannot_be_measured(answer: Recording, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        ServedAnswer.parse(answer)


@pytest.mark.parametrize(
    ("usage", "name"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 0}, "completion_tokens"),
        ({"prompt_tokens": 7}, "completion_tokens"),
        ({"prompt_tokens": None, "completion_tokens": 4}, "prompt_tokens"),
        ({"prompt_tokens": 7, "completion_tokens": "4"}, "completion_tokens"),
        ({"prompt_tokens": True, "completion_tokens": 4}, "prompt_tokens"),
        ([1], "prompt_tokens"),
    ],
)
def test_counts_that_are_none(usage: object, name: str) -> None:
    counts = b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode()
    with pytest.raises(ServerError, match=f"expected the server's usage to have {name} of at least 1, got "):
        ServedAnswer.parse(recording(chunk("a"), counts, DONE))


def test_bodies_differ_from_the_first_words_on() -> None:
    """Also those of two benchmarks, because the server may remember the first."""
    benchmarks = [Requests("m", 50, 8, ignore_eos=True) for _ in range(2)]
    parsed = [json.loads(requests.next_body()) for requests in benchmarks for _ in range(10)]
    texts = [body["messages"][0]["content"] for body in parsed]
    assert {len(text.split()) for text in texts} == {50}
    assert len({" ".join(text.split()[:8]) for text in texts}) == 20
    assert {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}.items() <= parsed[0].items()


@pytest.mark.parametrize("knows", [True, False])
def test_ignore_eos_is_left_out_where_the_server_does_not_know_it(knows: bool) -> None:
    with FakeOpenAIServer(refused_fields=() if knows else ("ignore_eos",)) as server:
        assert knows_ignore_eos(Endpoint.parse(server.url), "m", is_chat=True) == knows
    assert ["ignore_eos" in request for request in server.requests] == ([True] if knows else [True, False])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"refused_fields": ("max_tokens",)}, RequestError),
        ({"status": 503}, ServerError),
        ({"cut_after": 1}, ServerError),
        ({"gives_usage": False}, ServerError),
    ],
)
def test_server_that_cannot_be_measured(settings: dict[str, Any], error: type[Exception]) -> None:
    with FakeOpenAIServer(**settings) as server, pytest.raises(error):
        knows_ignore_eos(Endpoint.parse(server.url), "m", is_chat=True)


def test_streams_run_at_once_and_requests_of_a_stream_one_after_the_other() -> None:
    with FakeOpenAIServer(before_piece_s=0.01) as server:
        endpoint = Endpoint.parse(server.url)
        run = run_streams(endpoint, Requests("m", 5, 4, ignore_eos=False), num_streams=3, num_requests=2)
    assert len(server.requests) == len(run.answers) == 6
    assert len({request["messages"][0]["content"] for request in server.requests}) == 6
    starts, ends = [a.sent_s for a in run.answers], [a.moments[-1] for a in run.answers]
    firsts, seconds = range(0, 6, 2), range(1, 6, 2)
    assert max(starts[i] for i in firsts) < min(ends[i] for i in firsts)
    assert all(starts[second] > ends[first] for first, second in zip(firsts, seconds, strict=True))
    assert (run.tokens_per_s, run.requests_per_s) == (24 / run.seconds, 6 / run.seconds)
    assert run.generator_cores > 0
    level = Level.of(3, 5, [run])
    assert (level.answers, level.short_answers, level.tokens_per_output) == (6, 6, 1.0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--streams", "1,3", "--requests", "1", "--repeats", "2", "--new-tokens", "4", "--out", str(tmp_path)]
    with FakeOpenAIServer(refused_fields=("ignore_eos",)) as server:
        assert main(["bench", "serve", "--url", server.url, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"fake-model at {server.url}: 7 prompt tokens, 4 new tokens\nstreams  tokens/s")
    assert "ended before" not in out
    result = json.loads((tmp_path / "serve.json").read_text())
    assert [level["streams"] for level in result["levels"]] == [1, 3]
    assert [level["answers"] for level in result["levels"]] == [2, 6]
    assert all(len(level["tokens_per_s"]) == 2 for level in result["levels"])
    assert result["settings"]["ignore_eos"] is False
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_a_failed_answer_ends_the_other_streams_and_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two repeats is whole; in the second one the second level's first answer fails."""
    num_before = 1 + (1 + 2) + (50 + 100) + 50  # ignore_eos, warm-ups, the first repeat, one stream of the second

    class Failing(FakeOpenAIServer):
        async def _stream(self, request: dict[str, Any], reader: Any, writer: Any) -> None:
            self.status = 503 if len(self.requests) == num_before else 200
            await super()._stream(request, reader, writer)

    options = ["--streams", "1,2", "--requests", "50", "--repeats", "2", "--new-tokens", "4", "--out", str(tmp_path)]
    with Failing() as server:
        assert main(["bench", "serve", "--url", server.url, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("fastinfer: error: the server answered 503: no\n")
    assert len(server.requests) < num_before + 100
    assert [line.split()[0] for line in captured.out.splitlines()[2:4]] == ["1", "2"]
    result = json.loads((tmp_path / "serve.json").read_text())
    assert [(level["streams"], level["answers"]) for level in result["levels"]] == [(1, 100), (2, 100)]


def test_answers_that_end_early_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--streams", "2", "--requests", "1", "--repeats", "1", "--new-tokens", "9"]
    with FakeOpenAIServer() as server:
        assert main(["bench", "serve", "--url", server.url, *options]) == 0
    assert "2 of 2 answers ended before 9 tokens" in capsys.readouterr().out


def test_completions_for_models_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--completions", "--streams", "1", "--requests", "1", "--repeats", "1", "--new-tokens", "4"]
    with FakeOpenAIServer() as server:
        assert main(["bench", "serve", "--url", server.url, *options]) == 0
    assert set(server.paths) == {"/v1/models", "/v1/completions"}
    assert all("prompt" in request and "messages" not in request for request in server.requests)
    assert "7 prompt tokens, 4 new tokens" in capsys.readouterr().out
