"""The replicas behind a router: which there are, and which of them are ready."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import ServerError
from fastinfer.server.host_state import HostState
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.http_replica import HttpReplica
from fastinfer.server.router.policy import choose
from fastinfer.server.router.prompts import Prompt, parse_object
from fastinfer.server.router.replica import NOT_ASKED, Replica

LOG = logging.getLogger("fastinfer.server")

POLL_S = 0.02
# Failed questions in a row after which what runs on a replica is given up. One that is busy may miss some.
MAX_FAILED_PROBES = 3
MAX_PROBE_BYTES = 64 << 10


class RouterHost:
    """The replicas of a router.

    Args:
        config: the router's settings.
        endpoints: addresses of the replicas.
        prefill_endpoints: addresses of servers that only compute long prompts, see
            :mod:`fastinfer.server.router.prefill`.

    Attributes:
        state: what happens to new requests.
        replicas: all replicas.
        prefill_servers: the servers that only compute long prompts.
        is_stopped: whether running requests are to end.
        has_private_replicas: whether nobody but the router can reach the replicas, for instance for their metrics.
    """

    has_private_replicas = False

    def __init__(
        self, config: RouterConfig, endpoints: Iterable[Endpoint], prefill_endpoints: Iterable[Endpoint] = ()
    ) -> None:
        self.state = HostState.READY
        self.is_stopped = False
        self._config = config
        self._probes: dict[Replica, asyncio.Task[None]] = {}
        self.replicas: list[Replica] = [HttpReplica(endpoint, config.max_index_blocks) for endpoint in endpoints]
        self.prefill_servers = [HttpReplica(endpoint, config.max_index_blocks) for endpoint in prefill_endpoints]

    async def start(self) -> None:
        """Begin to ask the replicas whether they are ready, each at once."""
        for replica in self.servers:
            self._watch(replica)

    @property
    def servers(self) -> list[Replica]:
        """All replicas and all servers that only compute prompts."""
        return [*self.replicas, *self.prefill_servers]

    def add(self, endpoint: Endpoint, name: str) -> Replica:
        """Add a replica that is being started while the router runs."""
        replica = HttpReplica(endpoint, self._config.max_index_blocks, name)
        replica.set_unready("starting", is_reachable=False)
        self.replicas.append(replica)
        self._watch(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Forget a replica that has died; what runs on it continues on others."""
        self.replicas.remove(replica)
        replica.set_unready("removed")
        self._probes.pop(replica).cancel()
        replica.close()

    def choose(self, prompt: Prompt, refused: Collection[Replica] = ()) -> Replica | None:
        """Return the replica for a request that ``refused`` have refused; ``None`` if none is ready."""
        ready = (replica for replica in self.replicas if replica.is_ready and replica not in refused)
        return choose(ready, prompt, self._config.beta)

    def choose_prefill(self, prompt: Prompt) -> Replica | None:
        """Return the server that computes a long prompt first; ``None`` if none is ready."""
        return choose((server for server in self.prefill_servers if server.is_ready), prompt, self._config.beta)

    async def wait_for(self, prompt: Prompt) -> Replica | None:
        """Return the replica for a request that has lost its own; ``None`` if none gets ready in time."""
        deadline = time.monotonic() + self._config.replica_wait_s
        while (replica := self.choose(prompt)) is None and time.monotonic() < deadline and not self.is_stopped:
            await asyncio.sleep(POLL_S)
        return None if self.is_stopped else replica

    async def ask_again(self, servers: Collection[Replica]) -> None:
        """Ask servers anew whether they are ready, and wait for the answers, as long as one may take."""
        for server in servers:
            server.was_probed.clear()
            server.wake_probe.set()
        probes = asyncio.gather(*(server.was_probed.wait() for server in servers))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(probes, self._config.probe_timeout_s)

    def give_up(self) -> None:
        """Wait for nothing; a router loads nothing."""

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""
        self.state = HostState.DRAINING

    async def stop(self) -> None:
        """End all requests."""
        self.is_stopped = True
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        for replica in self.servers:
            replica.close()

    def _watch(self, replica: Replica) -> None:
        self._probes[replica] = asyncio.get_running_loop().create_task(self._probe_for_ever(replica))

    async def _probe_for_ever(self, replica: Replica) -> None:
        num_failed = 0
        # Python before 3.12 loses a cancellation that comes together with the end of what wait_for waits for.
        while replica in self._probes and not self.is_stopped:
            replica.wake_probe.clear()
            was_ready, is_first = replica.is_ready, replica.reason == NOT_ASKED
            try:
                reason, _ = await asyncio.wait_for(ask_state(replica, "/ready"), self._config.probe_timeout_s)
                num_failed = 0
            except (ServerError, asyncio.TimeoutError) as error:
                reason = str(error) or f"no answer within {self._config.probe_timeout_s:g} s"
                num_failed += 1
            if not reason:
                replica.set_ready()
            else:
                replica.set_unready(reason, is_reachable=not num_failed)
            if num_failed >= MAX_FAILED_PROBES:  # again, for a request that was sent anew on another connection
                replica.prefixes.clear()
                replica.close()
            if replica.is_ready and not was_ready:
                LOG.info("replica %s is ready", replica.name)
            elif (was_ready or is_first) and reason:
                LOG.warning("replica %s is not ready: %s", replica.name, reason)
            if not replica.wake_probe.is_set():  # or else the answer is older than the doubt
                replica.was_probed.set()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(replica.wake_probe.wait(), self._config.probe_interval_s)


async def ask_state(replica: Replica, path: str) -> tuple[str, dict[str, Any]]:
    """Ask a replica for its state.

    Args:
        replica: the replica.
        path: ``/ready`` or ``/health``.

    Returns:
        Why the answer is no, empty if it is yes; and the answer.

    Raises:
        ServerError: it does not answer.
    """
    async with replica.ask("GET", path, (), b"") as answer:
        body = b""
        while piece := await answer.read():
            body += piece
            if len(body) > MAX_PROBE_BYTES:
                raise ServerError(f"expected a short answer to {path}, got a long one")
        state = parse_object(body)
        return "" if answer.status == 200 else str(state.get("reason", f"status {answer.status}")), state
