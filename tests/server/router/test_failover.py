"""Replicas that die while they stream: the client's text is what it would have been."""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from support.case_selection import RUNS_ALL, share
from support.routers import BreakingProxy, router_server
from support.toy import ToyModel
from support.toy_server import GatedModel, toy_server

BODIES = (
    ("/v1/completions", {"prompt": "once upon a time"}),
    ("/v1/completions", {"prompt": ["once", "upon a time"], "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": "once", "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3, "logprobs": True}),
)


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], Any, bytes]:
    """Return a stream's choices, its usage, and its bytes."""
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return *parse(answer.text.split("\n\n")[:-1]), answer.content


def ask_gated(url: str, path: str, body: dict[str, Any], model: GatedModel, break_off: Callable[[], None]) -> list[str]:
    """Return the events of a stream that breaks off after five of them, whatever the load of the machine.

    The model computes the next token when the last one's event has come, and the rest without pause after the break.
    """
    events = []
    model.allow(1)
    with httpx.stream("POST", url + path, json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line)
                model.allow(1)
                if len(events) == 5:
                    break_off()
                    model.allow(200)
    return events


def parse(events: list[str]) -> tuple[dict[int, dict[str, Any]], Any]:
    """Return the choices and the usage of a whole stream."""
    assert events[-1] == "data: [DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage, ids = None, set()
    for event in events[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        assert "error" not in chunk, event
        ids.add((chunk["id"], chunk["created"]))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            state = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            assert state["end"] is None
            state["text"] += choice.get("text") or choice.get("delta", {}).get("content", "")
            state["end"] = choice["finish_reason"]
            logprobs = choice["logprobs"] or {}
            state["logprobs"] += logprobs.get("content") or logprobs.get("tokens") or []
    assert len(ids) == 1
    usage.pop("prompt_tokens_details")  # what is found in a cache depends on the replica
    return choices, usage


@pytest.mark.slow
def test_no_death_changes_a_text() -> None:
    generator = random.Random(0)
    with toy_server() as (_, one), toy_server() as (_, two), BreakingProxy(one) as first, BreakingProxy(two) as second:
        with router_server([first.url, second.url]) as (_, url):
            for number in share(range(100), 3):
                path, body = BODIES[number % len(BODIES)]
                options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24}
                body = {**body, **options, "ignore_eos": True, "temperature": 1.0, "seed": number}
                choices, usage, data = ask(one, path, body)
                first.break_after = generator.randint(1, len(data))
                second.break_after = first.break_after if number % 3 == 0 else None
                assert ask(url, path, body)[:2] == (choices, usage)
        assert first.num_broken + second.num_broken >= (50 if RUNS_ALL else 17)


def test_a_request_without_a_seed_gets_one() -> None:
    """Otherwise the rest of the text would be that of another draw, and the router would refuse to go on."""
    body = {"prompt": "once", "max_tokens": 60, "stream": True, "ignore_eos": True, "seed": None, "temperature": 1.0}
    body["stream_options"] = {"include_usage": True}
    with toy_server() as (_, one), toy_server() as (_, two), BreakingProxy(one) as first, BreakingProxy(two) as second:
        with router_server([first.url, second.url]) as (_, url):
            texts = set()
            for _ in range(50):  # an answer whose tokens came in few events is too short to break
                first.break_after = second.break_after = 4000
                choices, _, _ = ask(url, "/v1/completions", body)
                assert choices[0]["end"] == "length"
                texts.add(choices[0]["text"])
                if first.num_broken + second.num_broken >= 5:
                    break
            assert len(texts) > 1
        assert first.num_broken + second.num_broken >= 5


def test_texts_of_different_models_are_not_mixed() -> None:
    body = {"prompt": "once upon a time", "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
    model = GatedModel()
    with (
        toy_server(model) as (_, one),
        toy_server(ToyModel(windows=(4, 4))) as (_, two),
        BreakingProxy(one) as first,
        router_server([first.url, two]) as (host, url),
    ):
        host.replicas[1].last_chosen = 1  # so that the first one is chosen
        events = ask_gated(url, "/v1/completions", body, model, lambda: first.set_down(True))
    assert len(events) == 7
    error = json.loads(events[5].removeprefix("data: "))["error"]
    assert error["code"] == "replica_lost"
    assert "another replica wrote another text" in error["message"]
    assert events[6] == "data: [DONE]"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_streams_break_off(path: str) -> None:
    """Nobody may take a part for the whole."""
    message = {"role": "user", "content": "hello"}
    body: dict[str, Any] = {"model": "toy", "stream": True, "temperature": 0}
    body |= {"messages": [message], "max_tokens": 60} if path == "/v1/messages" else {"input": [message]}
    model = GatedModel()
    with (
        toy_server(model) as (_, one),
        BreakingProxy(one) as first,
        router_server([first.url]) as (_, url),
        pytest.raises(httpx.RemoteProtocolError),
    ):
        ask_gated(url, path, body, model, lambda: first.set_down(True))


def test_a_stream_waits_for_the_only_replica() -> None:
    body = {"prompt": "once", "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    model = GatedModel()
    with toy_server(model) as (_, one), BreakingProxy(one) as first, router_server([first.url]) as (_, url):

        def break_off() -> None:
            first.set_down(True)
            threading.Timer(0.3, first.set_down, [False]).start()

        events = ask_gated(url, "/v1/completions", body, model, break_off)
        assert parse(events) == ask(one, "/v1/completions", body)[:2]
        assert 'router_retries_total{reason="continued"} 1.0' in httpx.get(url + "/metrics").text


def test_a_stream_that_a_shutdown_ends_goes_on_elsewhere() -> None:
    body = {"prompt": "once", "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    model = GatedModel()
    with toy_server(model) as (server, one), toy_server() as (_, two), router_server([one, two]) as (host, url):
        expected = ask(two, "/v1/completions", body)[:2]
        host.replicas[1].set_unready("not yet")
        host.replicas[1].last_chosen = 1  # so that the other one is chosen whatever the next probe says
        model.allow(5)

        def stop() -> None:
            while not server.host.loaded.stats().num_running:  # type: ignore[attr-defined]
                time.sleep(0.005)
            time.sleep(0.2)
            server._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(server.host.stop()))  # type: ignore[union-attr]
            model.allow(1000)

        thread = threading.Thread(target=stop)
        thread.start()
        assert ask(url, "/v1/completions", body)[:2] == expected
        thread.join()
        assert host.replicas[0].last_chosen > 0


class DyingModel(ToyModel):
    """Breaks its device in a step."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps

    def forward(self, *args: Any) -> Any:
        if len(self.batch_sizes) == self._num_steps:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        return super().forward(*args)


@pytest.mark.parametrize("num_steps", [0, 5])
@pytest.mark.parametrize("is_stream", [True, False])
def test_an_engine_that_dies_in_a_server_that_lives_is_a_lost_replica(num_steps: int, is_stream: bool) -> None:
    body = {"prompt": "once", "max_tokens": 60, "stream": is_stream, "ignore_eos": True, "temperature": 0}
    dying = toy_server(DyingModel(num_steps))
    with dying as (_, one), toy_server() as (_, two), router_server([one, two]) as (host, url):
        host.replicas[1].last_chosen = 1
        if is_stream:
            body["stream_options"] = {"include_usage": True}
            assert ask(url, "/v1/completions", body)[:2] == ask(two, "/v1/completions", body)[:2]
        else:
            texts = [httpx.post(each + "/v1/completions", json=body).json()["choices"] for each in (url, two)]
            assert texts[0] == texts[1]
        assert host.replicas[0].last_chosen > 0
        assert not host.replicas[0].is_ready


def test_a_request_that_kills_engines_reaches_few() -> None:
    body = {"prompt": "once", "max_tokens": 60, "ignore_eos": True}  # a text that ends first would kill nobody
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(toy_server(DyingModel(3)))[1] for _ in range(4)]
        host, url = stack.enter_context(router_server(urls))
        answer = httpx.post(url + "/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
        assert sum(replica.last_chosen > 0 for replica in host.replicas) == 3


def test_a_stream_leaves_a_replica_that_hangs() -> None:
    body = {"prompt": "once", "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    probes = {"probe_interval_s": 0.05, "probe_timeout_s": 0.2}
    with (
        toy_server() as (_, one),
        toy_server() as (_, two),
        BreakingProxy(one) as first,
        BreakingProxy(two) as second,
        router_server([first.url, second.url], **probes) as (host, url),
    ):
        expected = ask(one, "/v1/completions", body)[:2]
        for proxy in (first, second):
            for _ in range(2):  # so that each replica has an idle connection, which the next request takes
                assert ask(url, "/v1/completions", body)[:2] == expected
            proxy.is_silent = True
            # Nobody knows yet; the one that is chosen answers nothing.
            assert ask(url, "/v1/completions", body)[:2] == expected
            proxy.is_silent = False
            while not all(replica.is_ready for replica in host.replicas):
                time.sleep(0.01)
