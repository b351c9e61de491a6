"""The way of a request to a replica, and of the answer to the client."""

import asyncio
import contextlib
import logging
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastinfer.errors import ServerError
from fastinfer.server.disconnect import disconnected
from fastinfer.server.errors import ENGINE_DEAD, RETRY_FULL_S, unavailable
from fastinfer.server.record import record
from fastinfer.server.router.prefill import prefill
from fastinfer.server.router.replica import Answer, Replica
from fastinfer.server.router.routed_request import RoutedRequest
from fastinfer.server.router.state import RouterState
from fastinfer.server.router.stream_replay import DivergedError, StreamReplay
from fastinfer.server.router.whole_answer import QUEUE_FULL, WholeAnswer, end_to_end
from fastinfer.server.sse import openai_error

LOG = logging.getLogger("fastinfer.server")

# Seconds until a request that nobody had room for is sent to the same replicas again.
FULL_PAUSE_S = 0.2


class _LostError(Exception):
    """The replica has died, or has given the request up, before the answer was complete."""


class Forwarded(Response):
    """The answer to a request that a replica computes.

    As long as nothing has been sent to the client, a request that is refused or lost goes to another replica. A stream
    of chunks goes on there even later (:class:`~fastinfer.server.router.stream_replay.StreamReplay`). Plain answers are
    read to their end before they are sent. If the client goes away, the connection to the replica is closed, which ends
    the request there. A client that reads slowly slows down the replica's stream, and is cut off at last.

    Args:
        router: the router.
        request: the request.
    """

    def __init__(self, router: RouterState, request: RoutedRequest) -> None:
        super().__init__()
        self._router = router
        self._request = request
        self._has_begun = False
        self._replay: StreamReplay | None = StreamReplay() if request.is_continuable else None
        self._refused: dict[Replica, WholeAnswer] = {}
        self._num_lost = 0
        self._write_began: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._raw_send = send
        relay = asyncio.ensure_future(self._relay())
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await self._watch(relay, gone)
        finally:
            gone.cancel()
            if not relay.done():
                relay.cancel()
                await asyncio.wait([relay])
        if relay.cancelled() or not relay.result():
            # Closing the connection would look like the end of the answer.
            scope.get("abort", _nothing)()

    async def _watch(self, relay: "asyncio.Future[Any]", gone: "asyncio.Future[Any]") -> None:
        """Return when the answer is complete, or when the client goes away or takes nothing more."""
        limit = self._router.config.write_timeout_s
        while True:
            await asyncio.wait([relay, gone], timeout=limit / 4, return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                return
            began = self._write_began
            if gone.done() or (began is not None and time.monotonic() - began > limit):
                record().error = "client_gone"
                return

    async def _relay(self) -> bool:
        """Send the answer, from one replica after the other if need be; False if the client's connection must break.

        Raises:
            APIError: no replica takes the request, or too many have died with it, and nothing has been sent.
        """
        host, prompt = self._router.host, self._request.prompt
        replica = host.choose(prompt)
        if replica is not None and host.prefill_servers:
            await prefill(self._router, self._request, replica)
            replica = host.choose(prompt)  # of now
        while True:
            if replica is None:
                if self._has_begun:
                    return await self._fail("no other replica could continue the stream")
                return await self._refuse()
            try:
                with replica.running(prompt) as num_matched:
                    self._router.metrics.sent(replica, prompt.num_bytes, num_matched)
                    refusal = await self._attempt(replica)
                if refusal is None:
                    return True
                self._refused[replica] = refusal
                self._router.metrics.retried("refused")
            except DivergedError:
                return await self._fail("another replica wrote another text; are all of them the same model?")
            except (_LostError, ServerError) as error:
                if not self._survives(replica, error):
                    return await self._fail("the replica has died with the request")
            replica = host.choose(prompt, self._refused)
            # A replica that has lost a connection may have lost this one alone, and is asked at once if it is ready.
            if replica is None and (self._has_begun or (self._num_lost and not self._refused)):
                if self._refused:
                    await asyncio.sleep(FULL_PAUSE_S)
                self._refused.clear()
                replica = await host.wait_for(prompt)

    def _survives(self, replica: Replica, error: Exception) -> bool:
        """Return whether another replica may take a request that has been lost."""
        self._num_lost += 1
        replica.lose(str(error))
        if self._router.host.is_stopped:
            return False
        LOG.warning("replica %s has lost a request: %s", replica.name, error)
        if self._num_lost > self._router.config.max_lost:
            return False
        if self._replay is not None:
            self._replay.restart()
        elif self._has_begun:
            return False
        self._router.metrics.retried("continued" if self._has_begun else "lost")
        return True

    async def _attempt(self, replica: Replica) -> WholeAnswer | None:
        """Send what a replica answers, unless it does not take the request.

        Raises:
            ServerError, _LostError: the replica is lost, or gives the request up.
        """
        request = self._request
        async with replica.ask(request.method, request.path, request.headers(), request.body, request.prompt) as answer:
            if answer.status == 200 and _is_stream(answer):
                await self._send_stream(answer)
                return None
            whole = await WholeAnswer.read(answer)
        code = whole.error_code if whole.status in (404, 503) else None
        if code is not None and whole.is_refusal:
            if code != QUEUE_FULL:  # which may be said of this prompt alone
                replica.set_unready(code)
            replica.wake_probe.set()
            return whole
        if code == ENGINE_DEAD:
            raise _LostError("its engine has died")
        if self._has_begun:
            raise _LostError(f"it has answered {whole.status} to a request that another replica had taken")
        if code == "model_not_found":
            return whole
        await self._send_whole(whole)
        return None

    async def _send_stream(self, answer: Answer) -> None:
        replay = self._replay
        while piece := await answer.read():
            data = piece if replay is None else replay.push(piece)
            if data:
                if not self._has_begun:
                    headers = end_to_end(answer.headers)
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._has_begun = True
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            if replay is not None and (replay.is_done or replay.is_aborted):
                break
        if replay is not None and not replay.is_done:
            raise _LostError("it has ended the stream")
        # The end of the body comes at once, and leaves the connection open for the next request.
        with contextlib.suppress(ServerError):
            while replay is not None and await answer.read():
                pass
        await self._send({"type": "http.response.body", "body": b""})

    async def _refuse(self) -> bool:
        """Send the answer of the last replica that has refused the request for now, or else of the last one.

        Raises:
            APIError: none has, or all say that there is no such model, and others that may have it are not ready.
        """
        refusals = sorted(self._refused.values(), key=lambda refusal: refusal.is_refusal)
        if not refusals:
            raise unavailable("no replica is ready", RETRY_FULL_S, "no_replica")
        refusal = refusals[-1]
        others = [replica.name for replica in self._router.host.replicas if replica not in self._refused]
        if others and not refusal.is_refusal:
            message = f"no replica that is ready has the model; not ready: {', '.join(others)}"
            raise unavailable(message, RETRY_FULL_S, "no_replica")
        record().error = refusal.error_code
        await self._send_whole(refusal)
        return True

    async def _fail(self, message: str) -> bool:
        """End an answer with an error, as far as it can still say so.

        Raises:
            APIError: nothing has been sent.
        """
        error = unavailable(message, RETRY_FULL_S, "replica_lost")
        if not self._has_begun:
            raise error
        record().error = error.name
        if self._replay is None:
            return False
        await self._send({"type": "http.response.body", "body": openai_error(error)})
        return True

    async def _send_whole(self, answer: WholeAnswer) -> None:
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        self._has_begun = True
        await self._send({"type": "http.response.body", "body": answer.body})

    async def _send(self, message: dict[str, object]) -> None:
        self._write_began = time.monotonic()
        await self._raw_send(message)
        self._write_began = None


def _is_stream(answer: Answer) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers)


def _nothing() -> None:
    pass
