"""Streams of outputs with a cache behind them: one replays a stored answer, the other one's answer is stored."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from fastinfer.outputs import RequestOutput
from fastinfer.server.cache.answer import encode
from fastinfer.server.cache.policy import is_complete
from fastinfer.server.cache.response_cache import Turn


class OutputSource(Protocol):
    """Source of outputs for the routes: :class:`fastinfer.async_engine.OutputStream` and the streams below."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput:
        """Return the next output; the last one is finished."""

    async def aclose(self) -> None:
        """End the request if it runs."""

    def abandon(self) -> None:
        """Have the request end soon, without waiting for that."""


class Replay(AsyncIterator[RequestOutput]):
    """A stored answer as a stream of one output.

    Args:
        output: the answer to one prompt.
    """

    def __init__(self, output: RequestOutput) -> None:
        self._output: RequestOutput | None = output

    async def __anext__(self) -> RequestOutput:
        output, self._output = self._output, None
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._output = None


class Recorder:
    """Collects the answers to the prompts of one request, and stores them when all have ended by themselves.

    Args:
        turn: the request's turn with the cache, which ends in any case.
        num_prompts: number of answers.
    """

    def __init__(self, turn: Turn, num_prompts: int) -> None:
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[int, RequestOutput] = {}
        self._num_prompts = num_prompts

    async def add(self, number: int, output: RequestOutput) -> None:
        """Take the last output of a prompt."""
        if not is_complete(completion.finish_reason for completion in output.outputs):
            self._turn.leave()
            return
        self._outputs[number] = output
        if len(self._outputs) == self._num_prompts:
            await self._turn.store(encode([self._outputs[i] for i in range(self._num_prompts)]))

    def give_up(self) -> None:
        """Store nothing unless all have ended; may be called in any thread, by the garbage collector for instance."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._turn.leave)


class Recording(AsyncIterator[RequestOutput]):
    """A stream whose last output goes to a recorder.

    Args:
        stream: the stream.
        recorder: the recorder of the whole request.
        number: number of the stream's prompt.
    """

    def __init__(self, stream: OutputSource, recorder: Recorder, number: int) -> None:
        self._stream = stream
        self._recorder = recorder
        self._number = number
        self._has_ended = False

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._stream.__anext__()
            if output.finished:
                self._has_ended = True
                await self._recorder.add(self._number, output)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._recorder.give_up()
            raise
        return output

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()

    def abandon(self) -> None:
        self._end()
        self._stream.abandon()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._recorder.give_up()
