"""Processes that the router starts: which it starts again, and which it leaves alone."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.paths import ROOT

from fastinfer.server.host_state import HostState
from fastinfer.server.router import local_replicas
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.local_replicas import LocalReplicas

FAKE = (sys.executable, "-S", str(ROOT / "tests/support/fake_replica.py"))


def run_until(condition: Callable[[LocalReplicas], Any], *environments: Mapping[str, str]) -> LocalReplicas:
    """Run processes until something is true of them, and end them."""

    async def wait(host: LocalReplicas) -> None:
        while not condition(host):
            await asyncio.sleep(0.01)

    async def main() -> LocalReplicas:
        config = RouterConfig(port=0, probe_interval_s=0.05, probe_timeout_s=0.1)
        host = LocalReplicas(config, FAKE, {}, environments)
        await host.start()
        try:
            await asyncio.wait_for(wait(host), 30)
        finally:
            await host.stop()
        return host

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_replicas, "MIN_PAUSE_S", 0.05)


def test_a_process_that_cannot_start_does_not_end_one_that_works() -> None:
    restarted = []

    def is_restarted(host: LocalReplicas) -> bool:
        restarted.extend(process.pid for process in host.processes if process.pid not in restarted)
        return len(restarted) >= 3 or host.failure is not None

    host = run_until(is_restarted, {"FAKE_REPLICA": "works"}, {"FAKE_REPLICA": "fails_to_start"})
    assert (host.failure, host.state) == (None, HostState.READY)
    host = run_until(lambda host: host.failure is not None, {"FAKE_REPLICA": "fails_to_start"})
    assert "a replica could not be started" in str(host.failure)


@pytest.mark.parametrize(("behaviour", "reason"), [("falls_ill", "it is broken"), ("hangs", "it does not answer")])
def test_a_process_that_is_ill_is_replaced(behaviour: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    first: list[int] = []

    def is_replaced(host: LocalReplicas) -> bool:
        first[:] = first or [process.pid for process in host.processes]
        return bool(host.processes) and host.processes[0].pid not in first and host.replicas[0].is_ready

    run_until(is_replaced, {"FAKE_REPLICA": behaviour})
    assert f"process 0 is ended: {reason}" in caplog.messages


@pytest.mark.parametrize("behaviour", ["loads", "sleeps"])
def test_a_process_that_loads_or_sleeps_is_left_alone(behaviour: str) -> None:
    end = time.monotonic() + 1.5  # time for more late answers than it takes
    pids: set[int] = set()

    def is_over(host: LocalReplicas) -> bool:
        pids.update(process.pid for process in host.processes)
        return time.monotonic() > end

    run_until(is_over, {"FAKE_REPLICA": behaviour})
    assert len(pids) == 1
