"""Engine for asyncio: every request has its own stream of outputs, and one thread runs all requests together."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastinfer import hub
from fastinfer.engine.engine import Engine
from fastinfer.engine.stats import EngineStats
from fastinfer.errors import QueueFullError, RequestError
from fastinfer.formats.peft import read_adapter
from fastinfer.llm import LLM
from fastinfer.outputs import Output, PrefillOutput, RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.serving.mailbox import Mailbox
from fastinfer.serving.prompt import Prompt, prepare
from fastinfer.utils.checks import INT64_MAX, check_int, show


class AsyncEngine:
    """Runs the requests of any number of asyncio tasks together.

    The engine runs in its own thread, which sleeps while there are no requests; steps do not block the event loop. All
    methods may be called from several threads, each with its own event loop. A stream must be read in the event loop
    that created it, by one task at a time. Nobody else may use the wrapped engine.

    A request that fails ends with the finish reason ``"error"``. If a whole step fails, all current requests end this
    way, and the engine continues with the requests that follow.

    >>> import asyncio
    >>> from fastinfer import AsyncEngine, SamplingParams
    >>> async def main():
    ...     async with AsyncEngine.from_model() as engine:
    ...         params = SamplingParams(temperature=0, max_tokens=8)
    ...         async for output in engine.generate("The capital of France is", params):
    ...             print(output.outputs[0].delta, end="")
    >>> asyncio.run(main())
     Paris...

    Args:
        engine: an engine that has no requests yet.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.has_unfinished:
            raise RequestError("engine must have no requests yet, got one with some")
        self._engine = engine
        # One thread runs everything that touches the engine, in the order of submission. Each step submits the next
        # step, so that work submitted meanwhile runs between the two.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fastinfer-engine")
        self._is_stepping = False
        self._stats = engine.stats()
        self._lock = threading.Lock()  # guards the next three attributes
        self._is_shut_down = False
        self._mailboxes: dict[str, Mailbox[Any]] = {}
        self._num_submitted = 0  # requests that the thread has not added yet
        # Mailboxes of streams that nobody reads any more; their requests are aborted before the next step. The garbage
        # collector may append at any moment, even while a lock is held, so this is a deque, which needs none.
        self._abandoned: deque[Mailbox[Any]] = deque()

    @classmethod
    def from_model(cls, model: str = hub.DEFAULT_MODEL, **options: Any) -> "AsyncEngine":
        """Load a model. This blocks; arguments and errors are those of :class:`fastinfer.LLM`."""
        return cls(LLM(model, **options).engine)

    def generate(
        self,
        prompt: Prompt | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> "OutputStream[RequestOutput]":
        """Start to complete a prompt.

        Args:
            prompt: a prompt as for :meth:`fastinfer.LLM.generate`, or its token ids.
            params: sampling parameters; ``default_params`` of the engine by default.
            request_id: an id that no unfinished request has; random by default.
            priority: number of which smaller values are served first.
            cache_salt: salt of a prompt that names none itself; only requests with the same salt share cached prefixes.
            adapter: name of a LoRA adapter, see :meth:`load_adapter`.

        Returns:
            A stream of the request's outputs, as ``params.output_kind`` says, of which the last one is ``finished``.

        Raises:
            QueueFullError: too many requests are waiting.
            RequestError: the request can never be served, or its id is taken. Nothing has been queued in this case.
            RuntimeError: the engine is shut down, or no event loop is running.
        """
        prepared = prepare(self._engine, _as_prompt(prompt), cache_salt=cache_salt)
        params = self._engine.default_params if params is None else params
        valid = self._engine.validate(prepared.token_ids, params, adapter)
        check_int("priority", priority, -INT64_MAX, INT64_MAX)
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id must be a string, got {show(request_id)}")
        mailbox: Mailbox[RequestOutput] = Mailbox(request_id)
        add = partial(self._engine.add_request, valid, params, prompt=prepared.text, priority=priority)
        names = {"request_id": mailbox.request_id, "cache_salt": prepared.cache_salt, "adapter": adapter}
        return self._submit(mailbox, partial(add, **names))

    async def embed(
        self,
        prompt: Prompt | list[int],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        priority: int = 0,
        adapter: str | None = None,
    ) -> PrefillOutput:
        """Compute the embedding of a prompt, see :meth:`fastinfer.LLM.embed`; raises the errors of :meth:`generate`."""
        prepared = prepare(self._engine, _as_prompt(prompt))
        valid = self._engine.validate(prepared.token_ids, adapter=adapter, generates=False)
        mailbox: Mailbox[PrefillOutput] = Mailbox()
        add = partial(self._engine.add_embedding_request, valid, pooling=pooling, normalize=normalize)
        names = {"request_id": mailbox.request_id, "cache_salt": prepared.cache_salt, "adapter": adapter}
        return await anext(self._submit(mailbox, partial(add, priority=priority, **names)))

    async def add_prompt_module(self, name: str, prompt: Prompt | list[int], *, adapter: str | None = None) -> None:
        """Compute a text and keep it in the cache, see :meth:`fastinfer.LLM.add_prompt_module`.

        Raises:
            QueueFullError, RequestError, RuntimeError: the errors of :meth:`fastinfer.LLM.add_prompt_module` and of
                :meth:`generate`.
        """
        prepared = prepare(self._engine, _as_prompt(prompt))
        valid = self._engine.validate(prepared.token_ids, adapter=adapter)
        mailbox: Mailbox[PrefillOutput] = Mailbox()
        add = partial(self._engine.add_prompt_module, name, valid, adapter=adapter)
        output = await anext(self._submit(mailbox, partial(add, cache_salt=prepared.cache_salt)))
        if output.finish_reason != "stop":
            raise RuntimeError(f"prompt module {name!r} was not computed: {output.stop_reason or output.finish_reason}")

    async def remove_prompt_module(self, name: str) -> None:
        """Release a prompt module.

        Raises:
            RequestError: there is no module of this name.
        """
        await self._call(self._engine.remove_prompt_module, name)

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter between two steps; raises the errors of :meth:`fastinfer.LLM.load_adapter`.

        The files are read while the steps go on.
        """
        adapter = await asyncio.to_thread(read_adapter, Path(path))
        await self._call(self._engine.load_adapter, name, adapter)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; raises the errors of :meth:`fastinfer.LLM.unload_adapter`."""
        await self._call(self._engine.unload_adapter, name)

    async def abort(self, request_id: str) -> None:
        """End a request at once; does nothing if the request is unknown or finished.

        Its stream gets one more output, with the finish reason ``"abort"``.
        """
        await self._call(self._end, [request_id])

    def stats(self) -> EngineStats:
        """Return the engine's statistics after its last step."""
        return self._stats

    async def shutdown(self) -> None:
        """Abort all requests, whose streams get a last output, and end the thread; a second call does nothing."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._thread.submit(self._end_all)
        await asyncio.to_thread(self._thread.shutdown)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _submit(self, mailbox: Mailbox[Output], add: Callable[[], str]) -> "OutputStream[Output]":
        """Have the engine's thread add a request whose outputs go to the mailbox."""
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the engine is shut down")
            if mailbox.request_id in self._mailboxes:
                raise RequestError(f"request_id must be new, got {mailbox.request_id!r}, which is still running")
            limit = self._engine.config.max_num_waiting
            if self._stats.num_waiting + self._num_submitted >= limit:
                raise QueueFullError(f"the queue is full: max_num_waiting={limit} requests wait")
            self._thread.submit(self._add, mailbox, add)
            self._mailboxes[mailbox.request_id] = mailbox
            self._num_submitted += 1
        return OutputStream(self, mailbox)

    async def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function between two steps; does nothing after the shutdown."""
        with self._lock:
            if self._is_shut_down:
                return
            future = self._thread.submit(function, *args)
        await asyncio.wrap_future(future)

    # All methods below run in the engine's thread.

    def _add(self, mailbox: Mailbox[Any], add: Callable[[], str]) -> None:
        outcome: str | Exception | None = None
        try:
            if not mailbox.is_abandoned:
                outcome = add()
        except Exception as error:  # the queue may have filled since _submit, for instance by preemptions
            outcome = error
        stats = self._engine.stats()
        with self._lock:  # change both counts together, or the request would count as submitted and as waiting
            self._stats = stats
            self._num_submitted -= 1
            del self._mailboxes[mailbox.request_id]
            if isinstance(outcome, str):
                mailbox.request_id = outcome
                self._mailboxes[outcome] = mailbox
        if isinstance(outcome, Exception):
            mailbox.put(outcome)
        if self._engine.has_unfinished and not self._is_stepping:
            self._is_stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        self._abort_abandoned()
        try:
            outputs = self._engine.step()
        except BaseException as error:  # any error must reach the streams, or their readers would wait forever
            self._end_all(error)
        else:
            self._publish(outputs)
        self._is_stepping = self._engine.has_unfinished
        if self._is_stepping:
            self._thread.submit(self._step)  # raises after the shutdown, which ends the remaining requests

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            mailbox = self._abandoned.popleft()
            if self._mailboxes.get(mailbox.request_id) is mailbox:
                self._end([mailbox.request_id])

    def _end_all(self, error: BaseException | None = None) -> None:
        with self._lock:
            request_ids = list(self._mailboxes)
        self._end(request_ids, error)

    def _end(self, request_ids: list[str], error: BaseException | None = None) -> None:
        """Abort requests; their last outputs report the error, if there is one."""
        outputs = []
        for request_id in request_ids:
            try:
                output = self._engine.abort(request_id, error)
            except BaseException as failure:  # must reach the stream, or its reader would wait forever
                self._break(request_id, failure)
            else:
                if output is not None:
                    outputs.append(output)
        self._publish(outputs)

    def _break(self, request_id: str, error: BaseException) -> None:
        """End a request's stream by raising an error in its reader."""
        with self._lock:
            mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.put(error)

    def _publish(self, outputs: list[Any]) -> None:
        self._stats = self._engine.stats()
        for output in outputs:
            try:
                self._deliver(output)
            except BaseException as error:
                self._break(output.request_id, error)

    def _deliver(self, output: Any) -> None:
        """Put an output into the mailbox of its stream."""
        with self._lock:
            mailbox = self._mailboxes.get(output.request_id)
        if mailbox is not None and not mailbox.put(output):
            self._abandoned.append(mailbox)
        if output.finished:
            with self._lock:
                self._mailboxes.pop(output.request_id, None)


class OutputStream(AsyncIterator[Output]):
    """Asynchronous iterator over the outputs of one request; the last one is ``finished``.

    A slow reader misses outputs, but no text: each output reports everything since the output read before. Leaving the
    loop early, cancelling the task that waits or calling :meth:`aclose` aborts the request within one step. A task that
    may be cancelled while it does something else should use ``contextlib.aclosing``.

    Attributes:
        request_id: the engine's name for the request.
    """

    def __init__(self, engine: AsyncEngine, mailbox: Mailbox[Output]) -> None:
        self.request_id = mailbox.request_id
        self._engine = engine
        self._mailbox: Mailbox[Output] = mailbox
        self._has_ended = False

    async def __anext__(self) -> Output:
        if self._has_ended:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.get()
        except BaseException:  # cancelled, or the request was refused
            self._abandon()
            raise
        self._has_ended = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it is still running; its cache blocks are free when this returns."""
        self._abandon()
        await self._engine._call(self._engine._abort_abandoned)

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._mailbox.is_abandoned = True
            self._engine._abandoned.append(self._mailbox)


def _as_prompt(prompt: Prompt | list[int]) -> Prompt:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
