"""A router in a thread, and connections that break."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from fastinfer.client.endpoint import Endpoint
from fastinfer.server.draining_server import DrainingServer
from fastinfer.server.router.app import create_app
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost


def router_host(urls: Sequence[str], prefill_urls: Sequence[str] = (), **settings: Any) -> RouterHost:
    config = RouterConfig(port=0, **{"probe_interval_s": 0.05} | settings)
    endpoints, prefill_endpoints = (
        [Endpoint.parse(url, default_path="") for url in some] for some in (urls, prefill_urls)
    )
    return RouterHost(config, endpoints, prefill_endpoints)


@contextlib.contextmanager
def router_server(
    urls: Sequence[str], prefill_urls: Sequence[str] = (), *, is_ready: bool = True, **settings: Any
) -> Iterator[tuple[RouterHost, str]]:
    """A router in front of servers, and its address; it is ready as soon as all servers are, unless told otherwise."""
    host = router_host(urls, prefill_urls, **settings)
    server = DrainingServer(create_app(host._config, host), host._config)
    thread = threading.Thread(target=server.run)
    thread.start()
    pause = threading.Event()
    try:
        while not server.started or (is_ready and not all(replica.is_ready for replica in host.servers)):
            assert thread.is_alive()
            pause.wait(0.005)
        yield host, server.address
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


class BreakingProxy:
    """A proxy on 127.0.0.1 in a thread of its own, as a context manager; it breaks connections as a dying server does.

    Args:
        url: address of the server behind.

    Attributes:
        url: the proxy's own address.
        break_after: number of bytes of an answer to a POST after which its connection breaks, once; ``None`` for never.
        breaks_again: whether every answer breaks there.
        is_silent: whether answers are lost, while connections stay open.
        num_broken: number of connections that it has broken.
    """

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://").split(":")
        self.break_after: int | None = None
        self.breaks_again = False
        self.is_silent = False
        self.num_broken = 0
        self._is_down = False
        self._writers: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> "BreakingProxy":
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set_down(self, is_down: bool) -> None:
        """Break all connections and refuse new ones, or take them again."""

        def change() -> None:
            self._is_down = is_down
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(change)

    async def _stop(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_down:
            writer.transport.abort()
            return
        self._writers.add(writer)
        upstream_reader, upstream = await asyncio.open_connection(*self._target)
        is_post = False

        async def upwards() -> None:
            nonlocal is_post
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    is_post = data.startswith(b"POST") or (is_post and not data.startswith(b"GET"))
                    upstream.write(data)
            upstream.close()

        sending = asyncio.ensure_future(upwards())
        num_bytes = 0
        try:
            while data := await upstream_reader.read(65536):
                if self.is_silent:
                    continue
                if is_post and self.break_after is not None:
                    num_bytes += len(data)
                    if num_bytes >= self.break_after:
                        writer.write(data[: len(data) - (num_bytes - self.break_after)])
                        await writer.drain()
                        if not self.breaks_again:
                            self.break_after = None
                        self.num_broken += 1
                        break
                writer.write(data)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            sending.cancel()
            upstream.close()
            writer.close()
