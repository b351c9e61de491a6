"""Engine for asyncio: every request has its own stream of outputs, and one thread runs all requests together."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastinfer import hub
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.engine.stats import EngineStats, StepStats
from fastinfer.errors import QueueFullError, RequestError, UnavailableError
from fastinfer.llm import LLM
from fastinfer.outputs import Output, PrefillOutput, RequestOutput, ScoreOutput
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.serving.jobs import QueueRequest, beam_search_job, embedding_job, generation_job, pinned_prompt_job
from fastinfer.serving.mailbox import Mailbox
from fastinfer.serving.prompt import PreparedPrompt, Prompt, prepare, prepare_chat
from fastinfer.serving.prompt_threads import PromptThreads
from fastinfer.serving.scoring import SCORE_PARAMS, Scorable, prepare_score, score_of
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.checks import check_int, show
from fastinfer.utils.forks import renew_in_children

POLL_S = 0.01

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Health:
    """The state of an :class:`AsyncEngine`.

    Attributes:
        refusal: why no requests are taken; ``None`` if they are.
        is_paused: whether requests wait for :meth:`AsyncEngine.resume`.
        is_dead: whether the device, or a process that has a part of the model, has failed in a way that only a new
            process can recover from.
        step_seconds: how long the current step has been running; 0 between steps. A step that takes minutes hangs.
        is_sleeping: whether memory is freed until :meth:`AsyncEngine.wake_up`.
    """

    refusal: str | None
    is_paused: bool
    is_dead: bool
    step_seconds: float
    is_sleeping: bool


class AsyncEngine:
    """Runs the requests of any number of asyncio tasks together.

    The engine runs in its own thread, which sleeps while there are no requests. Neither steps nor the tokenising of
    prompts block the event loop. All methods may be called from several threads, each with its own event loop. A stream
    must be read in the event loop that created it, by one task at a time. Nobody else may use the wrapped engine.

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
        self._is_paused = self._is_dead = self._is_draining = False
        self._is_shut_down = self._is_closing = False
        self._start()
        renew_in_children(self)

    def _start(self) -> None:
        """Make the threads, and what belongs to the requests."""
        # One thread runs everything that touches the engine, in the order of submission. Each step submits the next
        # step, so that work submitted meanwhile runs between the two.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fastinfer-engine")
        self._prompt_threads = PromptThreads()
        self._is_step_submitted = False
        self._is_falling_asleep = False
        self._step_began: float | None = None
        self._stats = self._engine.stats()
        # Guards the flags of draining, falling asleep and shutting down, and the next two attributes.
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox[Any]] = {}
        self._num_submitted = 0  # requests that the engine's thread has not added yet
        # Mailboxes of streams that nobody reads any more; their requests are aborted before the next step or request.
        # The garbage collector may append at any moment, even while a lock is held, so this is a deque, which needs
        # none.
        self._abandoned: deque[Mailbox[Any]] = deque()

    def renew_after_fork(self) -> None:
        """Begin anew in a forked child, without the requests: the streams that read them are the parent's."""
        for request_id in list(self._engine.requests.active):
            self._engine.abort(request_id)
        self._start()

    @classmethod
    def from_model(cls, model: str = hub.DEFAULT_MODEL, **options: Any) -> "AsyncEngine":
        """Load a model. This blocks; arguments and errors are those of :class:`fastinfer.LLM`."""
        return cls(LLM(model, **options).engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and generated tokens together."""
        return self._engine.max_model_len

    @property
    def takes_images(self) -> bool:
        """Whether the model reads images."""
        return self._engine.image_encoder is not None

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests that give none, see :attr:`fastinfer.LLM.default_params`."""
        return self._engine.default_params

    @property
    def is_full(self) -> bool:
        """Whether the next request is refused because too many requests, or too many of their tokens, are waiting."""
        config, stats = self._engine.config, self._stats
        tokens = config.max_num_waiting_tokens
        is_long = tokens is not None and stats.num_waiting_tokens >= tokens
        return is_long or stats.num_waiting + self._num_submitted >= config.max_num_waiting

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return self._engine.vocab_size

    @property
    def config(self) -> EngineConfig:
        """Limits and options of the engine."""
        return self._engine.config

    @property
    def fingerprint(self) -> str:
        """Hash of what decides answers apart from the request and the adapter; empty if that is not known."""
        return self._engine.fingerprint

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that requests may name."""
        return self._engine.adapters.names

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of the LoRA adapters of running requests and of waiting ones, sorted."""
        return self._engine.adapters_in_use()

    def adapter_digest(self, name: str) -> str:
        """Return the hash of an adapter's updates; empty if there is no such adapter, or it has not been read yet."""
        return self._engine.adapters.digest_of(name)

    def generate(
        self,
        prompt: Prompt | list[int] | PreparedPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> "OutputStream[RequestOutput]":
        """Start to complete a prompt.

        The prompt is tokenised and checked in another thread, so that neither the event loop nor other requests wait
        for it. If the request can never be served, reading the stream raises a RequestError;
        :meth:`OutputStream.accepted` waits for that check alone.

        Args:
            prompt: a prompt as for :meth:`fastinfer.LLM.generate`, its token ids, or what :meth:`prepare` or
                :meth:`prepare_chat` has returned.
            params: sampling parameters; :attr:`default_params` by default.
            request_id: an id that no unfinished request has; random by default.
            priority: number of which smaller values are served first.
            cache_salt: salt of a prompt that names none itself; only requests with the same salt share cached prefixes.
            adapter: name of a LoRA adapter, see :meth:`load_adapter`.
            timeout, queue_timeout: seconds in which the request must end and must be begun, from when it is queued; see
                :meth:`fastinfer.engine.engine.Engine.add_request`.

        Returns:
            A stream of the request's outputs, as ``params.output_kind`` says, of which the last one is ``finished``.

        Raises:
            QueueFullError: too many requests are waiting.
            RequestError: the id is taken.
            UnavailableError: the engine is draining, asleep, shut down, or dead.
            RuntimeError: no event loop is running.
        """
        return self._generate(
            prompt,
            lambda: _prepared(self._engine, prompt, cache_salt),
            params,
            request_id,
            {"priority": priority, "adapter": adapter, "timeout": timeout, "queue_timeout": queue_timeout},
        )

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_variables: dict[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> "OutputStream[RequestOutput]":
        """Start to answer a conversation, such as ``[{"role": "user", "content": "Hello"}]``.

        Args:
            messages: messages, see :func:`fastinfer.tokenizers.chat_template.render`.
            params: sampling parameters; :attr:`default_params` by default.
            template_variables: variables of the model's chat template, such as ``tools`` and ``enable_thinking``.
            request_id, priority, cache_salt, adapter, timeout, queue_timeout: as for :meth:`generate`.

        Returns:
            A stream as that of :meth:`generate`; reading it raises an UnsupportedModelError if the model has no chat
            template.

        Raises:
            QueueFullError, RequestError, UnavailableError: the errors of :meth:`generate`.
        """
        return self._generate(
            (messages, template_variables),
            lambda: prepare_chat(self._engine, messages, template_variables, cache_salt=cache_salt),
            params,
            request_id,
            {"priority": priority, "adapter": adapter, "timeout": timeout, "queue_timeout": queue_timeout},
        )

    async def beam_search(
        self,
        prompt: Prompt | list[int] | PreparedPrompt,
        params: BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> RequestOutput:
        """Complete a prompt by beam search, see :meth:`fastinfer.LLM.beam_search`.

        Args:
            prompt: a prompt as for :meth:`generate`.
            params: parameters of the search.
            priority, cache_salt, adapter, timeout, queue_timeout: as for :meth:`generate`.

        Raises:
            QueueFullError, RequestError, UnavailableError: the errors of :meth:`generate`.
        """
        options: dict[str, Any] = {
            "priority": priority,
            "adapter": adapter,
            "timeout": timeout,
            "queue_timeout": queue_timeout,
        }

        def check(request_id: str) -> QueueRequest:
            prepared = _prepared(self._engine, prompt, cache_salt)
            return beam_search_job(self._engine, prepared, params, request_id=request_id, **options)

        mailbox: Mailbox[RequestOutput] = Mailbox()
        return await anext(self._submit(mailbox, prompt, check))

    async def embed(
        self,
        prompt: Prompt | list[int] | PreparedPrompt,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> PrefillOutput:
        """Compute the embedding of a prompt, see :meth:`fastinfer.LLM.embed`.

        Args:
            prompt: a prompt as for :meth:`generate`.
            pooling: ``"mean"`` over all tokens, or the ``"last"`` token.
            normalize: scale the vector to length 1.
            priority, cache_salt, adapter, timeout, queue_timeout: as for :meth:`generate`.

        Raises:
            QueueFullError, RequestError, UnavailableError: the errors of :meth:`generate`.
        """
        options: dict[str, Any] = {
            "priority": priority,
            "adapter": adapter,
            "timeout": timeout,
            "queue_timeout": queue_timeout,
        }

        def check(request_id: str) -> QueueRequest:
            prepared = _prepared(self._engine, prompt, cache_salt)
            kind: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
            return embedding_job(self._engine, prepared, request_id=request_id, **kind, **options)

        mailbox: Mailbox[PrefillOutput] = Mailbox()
        return await anext(self._submit(mailbox, prompt, check))

    async def score(
        self,
        prompt: Scorable,
        *,
        priority: int = 0,
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> ScoreOutput:
        """Compute the log-likelihood of a text, or of a continuation given its context.

        Args:
            prompt: a prompt, or a pair (context, continuation), see :meth:`fastinfer.LLM.score`.
            priority, adapter, timeout, queue_timeout: as for :meth:`generate`.

        Raises:
            QueueFullError, RequestError, UnavailableError: the errors of :meth:`generate`.
            RuntimeError: the request failed or timed out.
        """
        start = 1

        def prepared() -> PreparedPrompt:
            nonlocal start
            joined, start = prepare_score(self._engine, prompt)
            return joined

        options: dict[str, Any] = {
            "priority": priority,
            "adapter": adapter,
            "timeout": timeout,
            "queue_timeout": queue_timeout,
        }
        output = await anext(self._generate(prompt, prepared, SCORE_PARAMS, None, options))
        return score_of(output, start)

    async def tokenize(self, prompt: Prompt | list[int]) -> list[int]:
        """Return a prompt's token ids, without keeping the event loop waiting.

        Raises:
            RequestError: the prompt is malformed or much too long.
        """
        return (await self.prepare(prompt)).token_ids

    async def prepare(
        self, prompt: Prompt | list[int], *, cache_salt: str = "", add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """Tokenise a prompt for one or several calls, without keeping the event loop waiting.

        Args:
            prompt: a prompt as for :meth:`generate`.
            cache_salt: salt of a prompt that names none itself.
            add_special_tokens: begin with the beginning-of-text token, if the model has one.

        Raises:
            RequestError: the prompt is malformed or much too long.
        """

        def run() -> PreparedPrompt:
            return _prepared(self._engine, prompt, cache_salt, add_special_tokens=add_special_tokens)

        return await self._in_pool(prompt, run)

    async def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        template_variables: dict[str, Any] | None = None,
        cache_salt: str = "",
        continue_final_message: bool = False,
    ) -> PreparedPrompt:
        """Render and tokenise a conversation for :meth:`generate`.

        Args:
            messages, template_variables, cache_salt: as for :meth:`chat`.
            continue_final_message: end the prompt with the content of the last message, which the answer continues.

        Raises:
            RequestError, UnsupportedModelError: the errors of :meth:`chat`.
        """

        def run() -> PreparedPrompt:
            return prepare_chat(
                self._engine,
                messages,
                template_variables,
                cache_salt=cache_salt,
                continue_final_message=continue_final_message,
            )

        return await self._in_pool((messages, template_variables), run)

    async def compile(self, constraint: StructuredOutputsParams) -> None:
        """Compile a grammar ahead of the request that needs it, which then finds it.

        A request whose grammar cannot be compiled ends with the finish reason ``"error"``; here the error is raised.

        Raises:
            RequestError: the grammar cannot be enforced.
        """
        await asyncio.wrap_future(self._engine.grammars.submit(constraint))

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            RequestError: ``token_ids`` is not a list, or an id is not in the vocabulary.
        """

        def decode() -> str:
            if not isinstance(token_ids, list):
                raise RequestError(f"token_ids must be a list, got {show(token_ids)}")
            for token_id in token_ids:
                check_int("token_ids", token_id, 0, self._engine.vocab_size - 1)
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._in_pool(token_ids, decode)

    async def pin_prompt(self, name: str, prompt: Prompt | list[int], *, adapter: str | None = None) -> None:
        """Compute a text and keep it in the cache, see :meth:`fastinfer.LLM.pin_prompt`.

        Raises:
            QueueFullError, RequestError, RuntimeError, UnavailableError: the errors of
                :meth:`fastinfer.LLM.pin_prompt` and of :meth:`generate`.
        """

        def check(request_id: str) -> QueueRequest:
            prepared = prepare(self._engine, _as_prompt(prompt))
            return pinned_prompt_job(self._engine, name, prepared, adapter, request_id)

        mailbox: Mailbox[PrefillOutput] = Mailbox()
        output = await anext(self._submit(mailbox, prompt, check))
        if output.finish_reason != "stop":
            raise RuntimeError(f"pinned prompt {name!r} was not computed: {output.stop_reason or output.finish_reason}")

    async def unpin_prompt(self, name: str) -> None:
        """Release a pinned prompt.

        Raises:
            RequestError: there is no pinned prompt of this name.
        """
        await self._call(self._engine.unpin_prompt, name)

    async def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter; raises the errors of :meth:`fastinfer.LLM.load_adapter`.

        The files are read while the steps go on. With ``replace`` it takes the place of an adapter of this name, which
        stays if there is an error; it must not be in use, as for :meth:`unload_adapter`.
        """
        adapter = await asyncio.to_thread(self._engine.read_adapter, path)
        await self._call(partial(self._engine.load_adapter, name, adapter, replace=replace))

    async def register_adapter(self, name: str, path: str | Path) -> None:
        """Register a LoRA adapter that is read when a request needs it, see :meth:`fastinfer.LLM.register_adapter`.

        Raises:
            RequestError: the name is taken, or ``max_loras`` is 0.
        """
        await self._call(self._engine.register_adapter, name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; raises the errors of :meth:`fastinfer.LLM.unload_adapter`."""
        await self._call(self._engine.unload_adapter, name)

    async def abort(self, request_id: str) -> None:
        """End a request at once; does nothing if the request is unknown or finished.

        Its stream gets one more output, with the finish reason ``"abort"``.
        """
        with self._lock:
            mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            await asyncio.wait([asyncio.wrap_future(mailbox.preparation)])
        await self._call(self._end, [request_id])

    async def drain(self) -> None:
        """Take no more requests, and wait until all that there are have ended; a paused engine is resumed."""
        with self._lock:
            self._is_draining = True
        await self._wait_until_idle()

    async def sleep(self, level: int = 1) -> None:
        """Take no more requests, wait until all that there are have ended, and free memory until :meth:`wake_up`.

        What is freed: see :meth:`fastinfer.LLM.sleep`. A paused engine is resumed. To end the requests at once, abort
        them.

        Args:
            level: 1 or 2.

        Raises:
            RequestError: there is no such level, or the engine sleeps already or is about to.
        """
        self._engine.check_sleep(level)
        with self._lock:
            if self._is_falling_asleep:
                raise RequestError("the engine is about to sleep already")
            self._is_falling_asleep = True
        try:
            await self._wait_until_idle()
            await self._call(self._sleep, level)
        finally:
            self._is_falling_asleep = False

    async def wake_up(self) -> None:
        """Get back what :meth:`sleep` has freed, in the engine's thread; does nothing if nothing has been.

        Raises:
            OutOfMemoryError, FastinferError, RuntimeError: the errors of :meth:`fastinfer.LLM.wake_up`.
        """
        await self._call(self._wake_up)

    async def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes between two steps, see :meth:`fastinfer.engine.engine.Engine.reset_prefix_cache`.

        Pinned prompts are computed again beside other requests; one that fails is lost.
        """
        await self._call(self._reset_prefix_cache)

    async def pause(self) -> None:
        """Stop computing after the current step, until :meth:`resume`; requests are taken and wait.

        No step is running when this returns, so that the model's weights, for instance, may be changed. Then
        :meth:`reset_prefix_cache` forgets what the old ones have computed, but not of unfinished requests, and not in
        ``kv_offloading_dir``. Timeouts end requests only after :meth:`resume`.
        """
        await self._call(self._set_paused, True)

    async def resume(self) -> None:
        """Go on after :meth:`pause`; does nothing if the engine is not paused."""
        await self._call(self._set_paused, False)

    def health(self) -> Health:
        """Return whether the engine works; may be called at any time, from any thread."""
        begin = self._step_began
        seconds = 0.0 if begin is None else time.perf_counter() - begin
        is_dead = self._is_dead or bool(self._engine.lost_ranks)
        return Health(self._refusal(), self._is_paused, is_dead, seconds, self._engine.is_sleeping)

    def on_step(self, function: Callable[[StepStats], None] | None) -> None:
        """Have a function called after each step, in the engine's thread; ``None`` ends that. It must be quick."""
        self._engine.on_step = function

    def stats(self) -> EngineStats:
        """Return the engine's statistics after its last step."""
        return self._stats

    async def shutdown(self) -> None:
        """Abort all requests, whose streams get a last output, and end the threads; a second call does nothing."""
        with self._lock:
            self._is_shut_down = True
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _refusal(self) -> str | None:
        """Return why no requests are taken, or ``None``."""
        if self._is_shut_down:
            return "the engine is shut down"
        if self._is_dead:
            return "the engine is dead: the device failed, and only a new process can use it again"
        if self._engine.lost_ranks:
            return f"the engine is dead: {self._engine.lost_ranks}"
        if self._engine.is_sleeping or self._is_falling_asleep:
            return "the engine sleeps until wake_up() is called"
        return "the engine is draining" if self._is_draining else None

    def _generate(
        self,
        content: object,
        prepared: Callable[[], PreparedPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        options: dict[str, Any],
    ) -> "OutputStream[RequestOutput]":
        params = self.default_params if params is None else params

        def check(request_id: str) -> QueueRequest:
            return generation_job(self._engine, prepared(), params, request_id=request_id, **options)

        return self._submit(Mailbox(request_id), content, check)

    def _submit(
        self, mailbox: Mailbox[Output], content: object, check: Callable[[str], QueueRequest]
    ) -> "OutputStream[Output]":
        """Check a request in another thread, and have the engine's thread queue it; its outputs go to the mailbox.

        ``check`` gets the request's id. ``content`` is what it tokenises, see :meth:`PromptThreads.submit`.
        """
        if not isinstance(mailbox.request_id, str):
            raise RequestError(f"request_id must be a string, got {show(mailbox.request_id)}")
        with self._lock:
            if (reason := self._refusal()) is not None:
                raise UnavailableError(reason)
            if mailbox.request_id in self._mailboxes:
                raise RequestError(f"request_id must be new, got {mailbox.request_id!r}, which is still running")
            limit = self._engine.config.max_num_waiting
            if self._stats.num_waiting + self._num_submitted >= limit:
                raise QueueFullError(f"the queue is full: max_num_waiting={limit} requests wait")
            mailbox.preparation = self._prompt_threads.submit(content, self._prepare, mailbox, check)
            self._mailboxes[mailbox.request_id] = mailbox
            self._num_submitted += 1
        return OutputStream(self, mailbox)

    async def _in_pool(self, content: object, function: Callable[[], Result]) -> Result:
        """Run a function beside the event loop; ``content`` is what it works on, see :meth:`PromptThreads.submit`.

        Raises:
            UnavailableError: the engine is shut down.
        """
        with self._lock:
            if self._is_shut_down:
                raise UnavailableError("the engine is shut down")
            future = self._prompt_threads.submit(content, function)
        return await asyncio.wrap_future(future)

    async def _wait_until_idle(self) -> None:
        """Resume the engine, and wait until all requests have ended; the caller has seen to it that none follow."""
        await self.resume()
        while self._mailboxes or self._engine.has_unfinished:  # pinned prompts that are computed again have no mailbox
            await asyncio.sleep(POLL_S)

    async def _call(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function between two steps; does nothing after the shutdown."""
        with self._lock:
            if self._is_shut_down:
                return
            future = self._thread.submit(function, *args)
        await asyncio.wrap_future(future)

    def _close(self) -> None:
        self._prompt_threads.shutdown()  # all requests that are being prepared reach the engine's thread
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._thread.submit(self._end_all)
        self._thread.shutdown()

    def _prepare(self, mailbox: Mailbox[Any], check: Callable[[str], QueueRequest]) -> None:
        """Check a request and pass it on to the engine's thread; runs in one of the threads for prompts."""
        outcome: QueueRequest | BaseException | None = None
        try:
            if not mailbox.is_abandoned:
                outcome = check(mailbox.request_id)
        except BaseException as error:  # must reach the stream, or its reader would wait forever
            outcome = error
        self._thread.submit(self._add, mailbox, outcome)

    # All methods below run in the engine's thread.

    def _add(self, mailbox: Mailbox[Any], job: QueueRequest | BaseException | None) -> None:
        """Queue a request; instead of its job there may be an error, or ``None`` if nobody reads its stream."""
        self._abort_abandoned()  # there may be no step for long, if all requests are refused
        outcome: str | BaseException | None = None
        try:
            outcome = None if mailbox.is_abandoned else job() if callable(job) else job
        except Exception as error:  # the queue may have filled since _submit, for instance by preemptions
            outcome = error
        stats = self._engine.stats()
        with self._lock:  # change both counts together, or the request would count as submitted and as waiting
            self._stats = stats
            self._num_submitted -= 1
            mailbox.is_queued = isinstance(outcome, str)
            if not mailbox.is_queued:
                del self._mailboxes[mailbox.request_id]
        if isinstance(outcome, BaseException):
            mailbox.put(outcome)
        else:
            mailbox.accept()
        self._submit_step()

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._submit_step()

    def _reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()
        self._stats = self._engine.stats()
        self._submit_step()

    def _wake_up(self) -> None:
        self._engine.wake_up()
        self._stats = self._engine.stats()

    def _sleep(self, level: int) -> None:
        self._engine.sleep(level)
        self._stats = self._engine.stats()

    def _submit_step(self) -> None:
        """Submit the next step if there is something to do."""
        if self._engine.has_unfinished and not (self._is_step_submitted or self._is_paused):
            self._thread.submit(self._step)  # raises after the shutdown, which ends the remaining requests
            self._is_step_submitted = True

    def _step(self) -> None:
        self._is_step_submitted = False
        if self._is_paused:
            return
        self._abort_abandoned()
        self._step_began = time.perf_counter()
        try:
            outputs = self._engine.step()
        except BaseException as error:  # any error must reach the streams, or their readers would wait forever
            self._is_dead |= isinstance(error, torch.AcceleratorError)
            self._end_all(error)
        else:
            self._publish(outputs)
        self._step_began = None
        self._submit_step()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            mailbox = self._abandoned.popleft()
            if self._mailboxes.get(mailbox.request_id) is mailbox:
                self._end([mailbox.request_id])

    def _end_all(self, error: BaseException | None = None) -> None:
        with self._lock:
            # Requests that are still being prepared had no part in a failed step.
            request_ids = [request_id for request_id, mailbox in self._mailboxes.items() if mailbox.is_queued]
        # Pinned prompts that are computed again are in no mailbox.
        self._end(list(dict.fromkeys([*request_ids, *self._engine.requests.active])), error)

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

    async def accepted(self) -> None:
        """Wait until the request is queued, which it is before its first output.

        Raises:
            QueueFullError, RequestError, UnsupportedModelError: the request is refused.
        """
        try:
            await self._mailbox.accepted()
        except Exception:
            self.abandon()
            raise

    async def __anext__(self) -> Output:
        if self._has_ended:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.get()
        except BaseException:  # cancelled, or the request was refused
            self.abandon()
            raise
        self._has_ended = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it is still running; its cache blocks are free when this returns."""
        self.abandon()
        if self._mailbox.is_abandoned:  # the engine's thread may be busy with a step, for which nobody else need wait
            await self._engine._call(self._engine._abort_abandoned)

    def __del__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Have the request aborted before the next step if it is still running, without waiting for that."""
        if not self._has_ended:
            self._has_ended = True
            self._mailbox.is_abandoned = True
            # A request that was refused has left already. The garbage collector may call this, so no lock is taken.
            if self._engine._mailboxes.get(self.request_id) is self._mailbox:
                self._engine._abandoned.append(self._mailbox)


def _as_prompt(prompt: Prompt | list[int]) -> Prompt:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _prepared(
    engine: Engine, prompt: Prompt | list[int] | PreparedPrompt, cache_salt: str, *, add_special_tokens: bool = True
) -> PreparedPrompt:
    if isinstance(prompt, PreparedPrompt):
        return prompt
    return prepare(engine, _as_prompt(prompt), cache_salt=cache_salt, add_special_tokens=add_special_tokens)
