"""Streams that go on on another replica: the client gets the same text as if nothing had happened."""

import json
import random
from typing import Any

import pytest

from fastinfer.errors import ServerError
from fastinfer.server.router.stream_replay import DivergedError, StreamReplay

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
TOKENS = ("Ein", " Mä", "rch", "en ", "von ", "😀", "\n\n", "data: ", "[DO", "NE]", ' "x"', "\\")


def frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def cut(tokens: list[Any], generator: random.Random) -> list[list[Any]]:
    """Cut a list into runs of random lengths, as outputs are merged that nobody took in time."""
    runs: list[list[Any]] = []
    while tokens:
        length = generator.randint(1, 4)
        runs.append(tokens[:length])
        tokens = tokens[length:]
    return runs


def stream(kind: str, seed: int, num_choices: int = 2) -> list[bytes]:
    """The frames of one replica: the seed decides the id and how the text is cut, not the text."""
    generator = random.Random(seed)
    head = {"id": f"id-{seed}", "created": seed, "model": "m"}
    frames: list[bytes] = [b": ping\n\n"] * (seed % 2)
    queues = []
    for index in range(num_choices):
        queue: list[dict[str, Any]] = []
        tokens = [f"{token}{index}" for token in TOKENS]
        if kind == "completions":
            queue = [{"text": "".join(run)} for run in cut(tokens, generator)]
            queue[-1] |= {"finish_reason": "length"}
        else:
            queue.append({"delta": {"role": "assistant", "content": ""}})
            queue += [{"delta": {"reasoning_content": "".join(run)}} for run in cut(tokens, generator)]
            queue += [{"delta": {"content": "".join(run)}} for run in cut(tokens, generator)]
            for number in range(2):
                call = {"index": number, "id": f"call-{seed}-{number}", "type": "function"}
                queue.append({"delta": {"tool_calls": [{**call, "function": {"name": f"f{number}", "arguments": ""}}]}})
                for run in cut(tokens, generator):
                    part = {"index": number, "function": {"arguments": "".join(run)}}
                    queue.append({"delta": {"tool_calls": [part]}})
            queue.append({"delta": {}, "finish_reason": "tool_calls"})
        queues.append([{"index": index, "logprobs": None, "finish_reason": None, **part} for part in queue])
    while any(queues):
        queue = generator.choice([queue for queue in queues if queue])
        frames.append(frame({**head, "choices": [queue.pop(0)], "usage": None}))
        if generator.random() < 0.1:
            frames.append(b": ping\n\n")
    return [*frames, frame({**head, "choices": [], "usage": USAGE}), DONE]


def read(data: bytes) -> dict[str, Any]:
    """What a client makes of a stream; fails on anything that comes twice or out of place."""
    assert data.endswith(DONE)
    assert data.count(DONE) == 1
    found: dict[str, Any] = {"ids": set(), "usage": None, "choices": {}}
    for event in data.split(b"\n\n")[:-2]:
        if event.startswith(b":"):
            continue
        chunk = json.loads(event.removeprefix(b"data: "))
        found["ids"].add((chunk["id"], chunk["created"]))
        if not chunk["choices"]:
            assert found["usage"] is None
            found["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            state = found["choices"].setdefault(
                choice["index"], {"text": "", "reasoning": "", "calls": {}, "end": None}
            )
            assert state["end"] is None
            state["end"] = choice["finish_reason"]
            delta = choice.get("delta", {"content": choice.get("text", "")})
            if "role" in delta:
                assert "role" not in state
                state["role"] = delta["role"]
            state["text"] += delta.get("content", "")
            state["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] not in state["calls"]
                    state["calls"][call["index"]] = {"id": call["id"], "name": call["function"]["name"], "text": ""}
                state["calls"][call["index"]]["text"] += call["function"]["arguments"]
    return found


def without_ids(found: dict[str, Any]) -> dict[str, Any]:
    assert len(found.pop("ids")) == 1
    for choice in found["choices"].values():
        for call in choice["calls"].values():
            del call["id"]
    return found


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_random_cuts(kind: str) -> None:
    """Up to three replicas die, after any byte."""
    generator = random.Random(kind)
    whole = without_ids(read(b"".join(stream(kind, 0))))
    for seed in range(300):
        replay = StreamReplay()
        received = b""
        for number in range(generator.randint(1, 3)):
            if number:
                replay.restart()
            data = b"".join(stream(kind, 10 * seed + number))
            data = data[: generator.randrange(len(data))]
            while data:
                length = generator.randint(1, 700)
                received += replay.push(data[:length])
                data = data[length:]
        replay.restart()
        for event in stream(kind, 10 * seed + 9):
            received += replay.push(event)
        assert replay.is_done
        assert without_ids(read(received)) == whole


def test_a_stream_that_does_not_break_stays_as_it_is() -> None:
    data = b"".join(stream("chat", 1))
    replay = StreamReplay()
    assert b"".join(replay.push(data[at : at + 100]) for at in range(0, len(data), 100)) == data


def test_token_ids_and_logprobs_are_not_repeated() -> None:
    def part(tokens: list[int], **fields: Any) -> bytes:
        texts = [f"<{token}>" for token in tokens]
        logprobs = {"tokens": texts, "token_logprobs": [-1.0 * token for token in tokens], "text_offset": tokens}
        choice = {"index": 0, "text": "".join(texts), "token_ids": tokens, "logprobs": logprobs, "finish_reason": None}
        return frame({"id": "a", "created": 1, "choices": [{**choice, **fields}]})

    replay = StreamReplay()
    replay.push(part([1], prompt_token_ids=[9]) + part([2, 3]))
    replay.restart()
    assert replay.push(part([1, 2], prompt_token_ids=[9])) == b""
    (event,) = replay.push(part([3, 4, 5])).splitlines()[:1]
    choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
    assert choice["text"] == "<4><5>"
    assert choice["token_ids"] == [4, 5]
    assert choice["logprobs"] == {"tokens": ["<4>", "<5>"], "token_logprobs": [-4.0, -5.0], "text_offset": [4, 5]}
    assert "prompt_token_ids" not in choice


@pytest.mark.parametrize("ending", [(" was large", None), ("", "stop")])
def test_another_text_is_never_sent(ending: tuple[str, str | None]) -> None:
    """Neither one that goes on in another way, nor one that ends before what has been sent."""

    def part(text: str, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
        return frame({"id": "a", "created": 1, "choices": [choice]})

    replay = StreamReplay()
    replay.push(part("Paris is"))
    replay.restart()
    assert replay.push(part("Paris")) == b""
    with pytest.raises(DivergedError):
        replay.push(part(*ending))


def test_errors() -> None:
    """That of a server that shuts down is taken for its death; others are for the client."""
    replay = StreamReplay()
    aborted = frame({"error": {"message": "the server has ended the request", "code": "aborted"}}) + DONE
    assert replay.push(aborted) == b""
    assert replay.is_aborted
    assert not replay.is_done
    replay.restart()
    failed = frame({"error": {"message": "no", "code": None}})
    assert replay.push(failed) == failed
    assert replay.has_begun
    assert replay.push(DONE) == DONE
    assert replay.is_done


@pytest.mark.parametrize("data", [b"data: x\n\n", b"data: {}\n\n", b'data: {"choices": [1]}\n\n', b"data: []\n\n"])
def test_what_is_no_stream_of_chunks(data: bytes) -> None:
    with pytest.raises(ServerError, match="expected a stream of chunks, got b'data"):
        StreamReplay().push(data)
