"""The notice that the machine is taken back, from metadata services on 127.0.0.1."""

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.fake_metadata import FakeMetadata
from support.toy import ToyTokenizer, greedy
from support.toy_server import GatedModel, toy_server
from support.waiting import until

from fastinfer.server import spot_notice
from fastinfer.server.spot_notice import PROVIDERS, Provider, SpotNotice

LONG = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def metadata() -> Iterator[FakeMetadata]:
    fake = FakeMetadata()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_notice, "POLL_S", 0.01)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_notice_is_read(provider: Provider, metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    notice = SpotNotice(provider, metadata.url + "/")
    assert not notice.is_given()
    metadata.events = [
        {"EventId": "0", "EventType": "Reboot", "Resources": ["vm_7"]},
        {"EventId": "1", "EventType": "Preempt", "Resources": ["vm_8"]},
    ]
    assert not notice.is_given()
    metadata.is_noticed = True
    assert notice.is_given()
    metadata.is_broken = True
    with pytest.raises(OSError, match="500"):
        notice.is_given()


class Stream:
    """A stream that is read in a thread."""

    def __init__(self, address: str) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(address,))
        self._thread.start()

    def _read(self, address: str) -> None:
        with httpx.stream("POST", f"{address}/v1/completions", json=LONG, timeout=30) as response:
            self.lines.extend(line for line in response.iter_lines() if line)

    def end(self) -> list[Any]:
        """Wait for the end, which is [DONE], and return the frames before it."""
        self._thread.join(30)
        assert self.lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_running_streams_end_and_new_requests_are_refused(provider: Provider, metadata: FakeMetadata) -> None:
    """The process stays until a signal comes."""
    model = GatedModel()
    with toy_server(model, spot_notice=provider, metadata_url=metadata.url) as (server, address):
        stream = Stream(address)
        model.allow(3)
        until(lambda: len(model.batch_sizes) == 3)
        until(lambda: metadata.num_asked > 4)
        assert httpx.get(f"{address}/ready").status_code == 200
        metadata.is_noticed = True
        until(lambda: httpx.get(f"{address}/ready").status_code == 503)
        refused = httpx.post(f"{address}/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        model.allow(1000)
        text = "".join(frame["choices"][0]["text"] for frame in stream.end())
        assert text == ToyTokenizer().decode(greedy([5, 6, 7], 40, stop_at_eos=False))
        time.sleep(0.2)
        assert not server.should_exit
        assert httpx.get(f"{address}/health").status_code == 200
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.should_exit)
        assert not server.force_exit


def test_a_signal_after_the_notice_does_not_cut_streams(metadata: FakeMetadata) -> None:
    """The node's own handler sends one, too."""
    model = GatedModel()
    with toy_server(model, spot_notice="aws", metadata_url=metadata.url) as (server, address):
        stream = Stream(address)
        model.allow(3)
        until(lambda: len(model.batch_sizes) == 3)
        metadata.is_noticed = True
        until(lambda: httpx.get(f"{address}/ready").status_code == 503)
        server.handle_exit(signal.SIGTERM, None)
        model.allow(1000)
        assert not any("error" in frame for frame in stream.end())
        until(lambda: server.should_exit)


def test_streams_that_take_too_long_end_with_an_error(metadata: FakeMetadata) -> None:
    model = GatedModel()
    with toy_server(model, spot_notice="gcp", metadata_url=metadata.url, drain_timeout_s=0.1) as (_, address):
        stream = Stream(address)
        model.allow(3)
        until(lambda: len(model.batch_sizes) == 3)
        metadata.is_noticed = True
        until(lambda: httpx.get(f"{address}/ready").status_code == 503)
        time.sleep(0.3)
        model.allow(1)  # the step that was waiting
        assert stream.end()[-1]["error"]["code"] == "aborted"


def test_a_machine_that_is_taken_back_serves_nobody_after_a_restart(metadata: FakeMetadata) -> None:
    metadata.is_noticed = True
    with toy_server(spot_notice="azure", metadata_url=metadata.url) as (server, address):
        until(lambda: httpx.get(f"{address}/ready").status_code == 503)
        assert httpx.get(f"{address}/health").status_code == 200
        server.handle_exit(signal.SIGTERM, None)


def test_a_broken_service_changes_nothing(metadata: FakeMetadata, caplog: pytest.LogCaptureFixture) -> None:
    metadata.is_broken = True
    with (
        caplog.at_level(logging.WARNING, "fastinfer.server"),
        toy_server(spot_notice="aws", metadata_url=metadata.url) as (_, address),
    ):
        until(lambda: metadata.num_asked > 5)
        assert httpx.get(f"{address}/ready").status_code == 200
    assert sum("metadata service" in message for message in caplog.messages) == 1
