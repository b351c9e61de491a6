"""The engine behind a server: it is loaded beside the event loop, watched, drained, and shut down."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import FastinferError
from fastinfer.server.errors import RETRY_FULL_S, RETRY_LOADING_S, APIError, unavailable
from fastinfer.server.host_state import HostState

LOG = logging.getLogger("fastinfer.server")


class EngineHost:
    """Loads an engine while the server listens, and says whether it takes requests.

    Args:
        load: function that loads the engine; it runs in a thread, which ends with the process at the latest.
        stall_s: seconds of a single step after which the engine counts as hanging.

    Attributes:
        state: what happens to new requests.
        failure: the error that ended the loading; ``None`` if there was none.
    """

    def __init__(self, load: Callable[[], AsyncEngine], stall_s: float) -> None:
        self.state = HostState.LOADING
        self.failure: BaseException | None = None
        self._load = load
        self._stall_s = stall_s
        self._engine: AsyncEngine | None = None
        self._loading: asyncio.Future[AsyncEngine | None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, whether it takes requests or not; ``None`` until it is loaded."""
        return self._engine

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for a new request.

        Raises:
            APIError: no requests are taken now.
        """
        if self.state is HostState.READY and self._engine is not None:
            return self._engine
        if self.state is HostState.LOADING:
            raise unavailable("the model is being loaded", RETRY_LOADING_S, "loading")
        if self.state is HostState.DRAINING:
            raise unavailable("the server is shutting down", RETRY_FULL_S, "draining")
        raise APIError(503, "the model could not be loaded; the server's log says why", code="failed")

    async def start(self) -> None:
        """Load the engine; returns when it is ready, has failed, or is not waited for any more."""
        loop = asyncio.get_running_loop()
        self._loading = loop.create_future()
        # Not asyncio's threads: the interpreter would wait for them, and a model may take many minutes.
        self._thread = threading.Thread(target=self._run_load, args=(loop, self._loading), name="load", daemon=True)
        self._thread.start()
        try:
            engine = await self._loading
        except Exception as error:
            self.failure, self.state = error, HostState.FAILED
            LOG.error("loading failed: %s", error, exc_info=not isinstance(error, FastinferError))
            return
        if engine is None:
            return
        self._engine = engine
        if self.state is HostState.LOADING:
            self.state = HostState.READY
        # What loading has made stays: collections need not look at it again.
        gc.collect()
        gc.freeze()

    def _run_load(self, loop: asyncio.AbstractEventLoop, loading: asyncio.Future[AsyncEngine | None]) -> None:
        result: AsyncEngine | BaseException
        try:
            result = self._load()
        except BaseException as error:
            result = error

        def deliver() -> None:
            if loading.done():
                return
            if isinstance(result, BaseException):
                loading.set_exception(result)
            else:
                loading.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver)

    def give_up(self) -> None:
        """Wait no longer for the engine that is being loaded."""
        if self._loading is not None and not self._loading.done():
            self._loading.set_result(None)

    @property
    def is_loading(self) -> bool:
        """Whether the thread that loads the engine is running, though nobody may wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""
        if self.state is not HostState.FAILED:
            self.state = HostState.DRAINING

    async def stop(self) -> None:
        """End all requests and the engine's threads."""
        if self._engine is not None:
            await self._engine.shutdown()

    def illness(self) -> str | None:
        """Return why the process should be restarted, or ``None`` if it works, or is still loading."""
        if self.state is HostState.FAILED:
            return "the model could not be loaded"
        if self._engine is None:
            return None
        health = self._engine.health()
        if health.is_dead:
            return health.refusal or "the device has failed"
        if health.step_seconds > self._stall_s:
            return f"a step has been running for {health.step_seconds:.0f} s"
        return None

    def unreadiness(self) -> str | None:
        """Return why requests should go to another replica, or ``None`` if they are welcome."""
        if (illness := self.illness()) is not None:
            return illness
        if self.state is not HostState.READY or self._engine is None:
            return self.state.value
        if (refusal := self._engine.health().refusal) is not None:
            return refusal
        return "the queue is full" if self._engine.is_full else None
