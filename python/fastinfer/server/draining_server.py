"""uvicorn with TLS, signals, and a drain before the end."""

import asyncio
import errno
import functools
import logging
import os
import signal
import socket
import stat
import time
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from fastinfer.errors import RequestError
from fastinfer.server.config import HttpConfig
from fastinfer.server.host_state import Host, HostState
from fastinfer.server.http_protocol import BoundedHttpProtocol
from fastinfer.server.logs import end_logs
from fastinfer.server.spot_notice import SpotNotice, watch
from fastinfer.utils.checks import show_path

LOG = logging.getLogger("fastinfer.server")

POLL_S = 0.05
# Seconds that streams get for their last frames once their requests have been ended.
FAREWELL_S = 2


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which by itself would stop to listen as soon as a signal comes, and fail the probes.

    Args:
        app: the application; ``app.state.server.host`` is what answers its requests.
        config: the server's settings.
    """

    def __init__(self, app: FastAPI, config: HttpConfig) -> None:
        protocol: Any = functools.partial(
            BoundedHttpProtocol, head_timeout_s=config.body_timeout_s, write_timeout_s=config.write_timeout_s
        )
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                uds=config.uds,
                root_path=config.root_path,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_keyfile_password=config.ssl_keyfile_password,
                http=protocol,
                timeout_keep_alive=config.keep_alive_s,
                timeout_graceful_shutdown=FAREWELL_S,
                server_header=False,
                proxy_headers=False,
                access_log=False,
                log_config=None,
                log_level="warning",
                ws="none",
            )
        )
        self.host: Host = app.state.server.host
        self._drain_timeout_s = config.drain_timeout_s
        self._drain_task: asyncio.Task[None] | None = None
        self._is_signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notice = None if config.spot_notice is None else SpotNotice(config.spot_notice, config.metadata_url)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, which loads the model or asks the replicas, if the address can be listened on."""
        if sockets is None:
            await self._check_address()
        try:
            await super().startup(sockets)
        except OSError as error:
            self.host.give_up()
            await self.lifespan.shutdown()
            if self.config.uds is None:
                raise
            raise RequestError(f"--uds: {show_path(self.config.uds)}: {error.strerror or error}") from None

    async def _check_address(self) -> None:
        if self.config.uds is not None:
            _check_socket_path(self.config.uds)
            return
        loop, host, port = asyncio.get_running_loop(), self.config.host, self.config.port
        try:
            probe = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        except OSError as error:
            option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise RequestError(f"{option}: {error.strerror}") from None
        probe.close()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        LOG.info("listening on %s", self.address)
        watcher = None if self._notice is None else self._loop.create_task(watch(self._notice, self._take_notice))
        await super().main_loop()
        if watcher is not None:
            watcher.cancel()

    async def on_tick(self, counter: int) -> bool:
        if self.host.state is HostState.FAILED:
            self.should_exit = True
        return bool(await super().on_tick(counter))

    @property
    def address(self) -> str:
        """Address at which the server listens."""
        if self.config.uds is not None:
            return f"unix:{self.config.uds}"
        scheme = "https" if self.config.is_ssl else "http"
        port = self.servers[0].sockets[0].getsockname()[1] if self.servers else self.config.port
        return f"{scheme}://{self.config.host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain, or end the process at once if this is the second signal."""
        if self._is_signalled or self._loop is None:
            LOG.warning("%s: ending at once", signal.Signals(sig).name)
            end_process(0)  # an ordinary end would wait for the engine's step
        self._is_signalled = True
        self._loop.call_soon_threadsafe(self._end, signal.Signals(sig).name)

    def _end(self, reason: str) -> None:
        self.host.give_up()
        self._begin_drain(reason)

    def _take_notice(self) -> None:
        self._begin_drain("the machine is taken back")

    def _begin_drain(self, reason: str) -> None:
        if self._drain_task is None:
            LOG.warning("%s: draining for at most %g s", reason, self._drain_timeout_s)
            self.host.begin_drain()
            self._drain_task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait until no request runs, abort those that take too long, and let uvicorn end after a signal."""
        await self._wait_for_requests(self._drain_timeout_s)
        if self._num_open():
            await self.host.stop()
        await self._wait_for_requests(FAREWELL_S)
        while not self._is_signalled:
            await asyncio.sleep(POLL_S)
        self.should_exit = True

    async def _wait_for_requests(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._num_open() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def _num_open(self) -> int:
        """Return the number of requests whose answers are not finished."""
        return len(self.server_state.tasks)


def end_process(code: int) -> NoReturn:
    """End the process, whatever its threads do; what has been logged is written."""
    end_logs()
    os._exit(code)


def _check_socket_path(path: str) -> None:
    """Check that a Unix socket can be made; one that is there already will be replaced.

    Raises:
        RequestError: it cannot.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"--uds: expected a path in a folder that can be written to, got {show_path(path)}")
    if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise RequestError(f"--uds: expected the path of a socket, or of nothing, got another file, {show_path(path)}")
