"""Processes that the router starts: which it starts again, and which it leaves alone."""

import asyncio
import sys
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
        config = RouterConfig(port=0, probe_interval_s=0.05, probe_timeout_s=0.2)
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
