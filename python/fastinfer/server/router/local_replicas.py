"""Replicas on this machine: processes that the router starts, restarts when they die or hang, and ends."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastinfer.client.endpoint import Endpoint
from fastinfer.errors import FastinferError, ServerError
from fastinfer.server.host_state import HostState
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost, ask_state
from fastinfer.server.router.replica import Replica

LOG = logging.getLogger("fastinfer.server")

POLL_S = 0.05
# Seconds until a process that has died without ever being ready is started again: twice as long each time.
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# Seconds after which a process that should end gets the next signal: a second SIGTERM, SIGKILL.
TERM_S, KILL_S = 1.0, 4.0
# Failed questions in a row about the health of a process after which it is ended. One that is busy may miss some.
MAX_ILL = 5
# Exit code of a command whose input is wrong: another start would end likewise.
WRONG_INPUT = 2


class LocalReplicas(RouterHost):
    """A router's replicas that are processes of this machine; one that dies, hangs or falls ill is started again.

    Each listens on a port of 127.0.0.1, on a socket that it inherits, so that no other program can take the port. It
    gets its settings as JSON on its standard input, where no other user sees them.

    Args:
        config: the router's settings.
        command: command line of a replica.
        settings: settings of a replica; ``socket`` and ``parent`` are added.
        environments: changes of the environment, one for each replica.
        descriptors: file descriptors that all replicas inherit.

    Attributes:
        failure: the error that ends the router: a replica cannot be started at all.
        processes: processes that run.
    """

    has_private_replicas = True

    def __init__(
        self,
        config: RouterConfig,
        command: Sequence[str],
        settings: Mapping[str, Any],
        environments: Sequence[Mapping[str, str]],
        descriptors: Sequence[int] = (),
    ) -> None:
        super().__init__(config, ())
        self.failure: FastinferError | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._command = command
        self._settings = settings
        self._environments = environments
        self._descriptors = descriptors
        self._keepers: list[asyncio.Task[None]] = []
        self._can_start = False  # whether any process has been ready

    async def start(self) -> None:
        """Start the processes."""
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(*numbered)) for numbered in enumerate(self._environments)]

    async def stop(self) -> None:
        """End all requests and all processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await super().stop()
        await asyncio.gather(*map(_end, self.processes))
        self.processes.clear()

    async def _keep(self, number: int, environment: Mapping[str, str]) -> None:
        """Run one replica, and start it again whenever it has died; its name stays the same for metrics."""
        pause = MIN_PAUSE_S
        while True:
            try:
                process, endpoint = self._spawn(environment)
            except OSError as error:
                return self._fail(f"a replica could not be started: {error}")
            self.processes.append(process)
            replica = self.add(endpoint, f"process {number}")
            has_been_ready = await self._has_ended(process, replica)
            self.processes.remove(process)
            self.remove(replica)
            if self.state is not HostState.READY:
                return None
            if process.returncode == WRONG_INPUT and not self._can_start:
                return self._fail("a replica could not be started, see above")
            LOG.error("%s has ended with code %d; starting it again", replica.name, process.returncode)
            pause = MIN_PAUSE_S if has_been_ready else min(2 * pause, MAX_PAUSE_S)
            if not has_been_ready:
                await asyncio.sleep(pause)

    def _fail(self, message: str) -> None:
        self.failure, self.state = FastinferError(message), HostState.FAILED

    def _spawn(self, environment: Mapping[str, str]) -> tuple["subprocess.Popen[bytes]", Endpoint]:
        """Start a process, and return it with its address."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno(), *self._descriptors],
                start_new_session=True,  # Ctrl-C is for the router, which drains first
                env={**os.environ, **environment},
            )
            settings = {**self._settings, "socket": listener.fileno(), "parent": os.getpid()}
            port = listener.getsockname()[1]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have died already
            process.stdin.write(json.dumps(settings).encode())
        return process, Endpoint.parse(f"http://127.0.0.1:{port}", default_path="")

    async def _has_ended(self, process: "subprocess.Popen[bytes]", replica: Replica) -> bool:
        """Wait for the end of a process, and return whether it has been ready before."""
        has_been_ready = False
        watch = asyncio.ensure_future(self._end_if_ill(process, replica))
        try:
            while process.poll() is None:
                has_been_ready |= replica.is_ready
                self._can_start |= has_been_ready
                await asyncio.sleep(POLL_S)
        finally:
            watch.cancel()
        return has_been_ready

    async def _end_if_ill(self, process: "subprocess.Popen[bytes]", replica: Replica) -> None:
        """End a process that only a restart helps, or that answers nothing any more. While it loads, it may be late."""
        num_ill, is_loaded, illness = 0, False, ""
        # Python before 3.12 may lose the cancellation, see RouterHost.
        while process.poll() is None:
            await asyncio.sleep(self._config.probe_interval_s)
            try:
                illness, health = await asyncio.wait_for(ask_state(replica, "/health"), self._config.probe_timeout_s)
            except (ServerError, asyncio.TimeoutError):
                illness = "it does not answer" if is_loaded else ""
            else:
                is_loaded |= health.get("state") == HostState.READY.value
            num_ill = num_ill + 1 if illness else 0
            if num_ill >= MAX_ILL:
                LOG.error("%s is ended: %s", replica.name, illness)
                return await _end(process)


async def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process: politely, at once, by force."""
    begin = time.monotonic()
    for seconds, number in ((0.0, signal.SIGTERM), (TERM_S, signal.SIGTERM), (KILL_S, signal.SIGKILL)):
        while process.poll() is None and time.monotonic() - begin < seconds:
            await asyncio.sleep(POLL_S)
        if process.poll() is None:
            process.send_signal(number)
    while process.poll() is None:
        await asyncio.sleep(POLL_S)
