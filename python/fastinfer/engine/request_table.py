"""The table of unfinished requests, from their arrival to their last output."""

import itertools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from fastinfer.engine.adapter_queue import AdapterQueue
from fastinfer.engine.adapters import Adapters
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.deadlines import Deadlines
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.grammar_queue import GrammarQueue
from fastinfer.engine.pinned_prompts import PinnedPrompts
from fastinfer.engine.request import Output, Request
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import SequenceState
from fastinfer.errors import FATAL_ERRORS, QueueFullError, RequestError, describe_error
from fastinfer.outputs import merge
from fastinfer.utils.checks import check_text

LOG = logging.getLogger("fastinfer")

# How long a step waits if nothing can be computed yet because a grammar is being compiled.
IDLE_WAIT_S = 0.001


class RequestTable:
    """Passes the sequences of requests to the scheduler when they can run, and removes them when they have ended.

    Args:
        scheduler: scheduler of the sequences.
        block_manager: manager of the sequences' blocks.
        pinned_prompts: sequences that keep their blocks when they have ended.
        adapters: the registered LoRA adapters.
        max_num_waiting: maximum number of waiting requests; further ones are refused.
        max_num_waiting_tokens: maximum number of their tokens; ``None`` for no limit.

    Attributes:
        active: unfinished requests by id.
        awaiting_grammar: unfinished requests that wait for their grammars.
        awaiting_adapter: unfinished requests that wait for their LoRA adapters.
        num_repairs: errors after which :meth:`repair` queued all sequences anew.
        num_expired: requests that missed a deadline.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        block_manager: BlockManager,
        pinned_prompts: PinnedPrompts,
        adapters: Adapters,
        max_num_waiting: int,
        max_num_waiting_tokens: int | None = None,
    ) -> None:
        self.active: dict[str, Request] = {}
        self.awaiting_grammar = GrammarQueue()
        self._adapters = adapters
        self.awaiting_adapter = AdapterQueue(adapters, scheduler.max_num_seqs)
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._pinned_prompts = pinned_prompts
        self._max_num_waiting = max_num_waiting
        self._max_num_waiting_tokens = max_num_waiting_tokens
        self.num_repairs = 0
        self.num_expired = 0
        self._deadlines = Deadlines()
        self._undelivered: dict[str, Output] = {}  # by request; outputs that no step has returned yet
        self._numbers = itertools.count()

    def check_room(self, num_tokens: int) -> None:
        """Check that another request may wait.

        Args:
            num_tokens: length of the request's prompt in tokens.

        Raises:
            QueueFullError: too many requests or tokens are waiting already.
        """
        if self.num_waiting >= self._max_num_waiting:
            raise QueueFullError(f"the queue is full: max_num_waiting={self._max_num_waiting} requests wait")
        limit = self._max_num_waiting_tokens
        if limit is not None and (waiting := self.num_waiting_tokens) and waiting + num_tokens > limit:
            raise QueueFullError(
                f"the queue is full: {waiting} tokens wait, max_num_waiting_tokens is {limit}, and the prompt has "
                f"{num_tokens}"
            )

    def new_id(self, request_id: str | None = None) -> str:
        """Return an id for a new request: the user's if given, otherwise a generated one.

        Raises:
            RequestError: an unfinished request has the user's id.
        """
        if request_id is None:
            numbered = (f"request-{number}" for number in self._numbers)
            return next(name for name in numbered if not self._is_used(name))  # users may have chosen such ids
        check_text("request_id", request_id)
        if self._is_used(request_id):
            raise RequestError(f"request_id must be new, got {request_id!r}, which is still running")
        return request_id

    def add(
        self,
        request: Request,
        grammar: Future[Grammar] | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> str:
        """Queue a request, once it has its grammar and its adapter if it needs any, and return its id.

        Args:
            request: the request.
            grammar: its grammar; ``None`` for any text.
            timeout, queue_timeout: seconds until it must have ended or begun; ``None`` for no limit.
        """
        try:
            self._deadlines.add(request, timeout, queue_timeout)
            self.active[request.request_id] = request
            if grammar is None:
                self._queue(request)
            else:
                self.awaiting_grammar.add(request, grammar)
            return request.request_id
        except BaseException:
            self._forget(request)
            self.repair()
            raise

    def begin_step(self) -> None:
        """End the requests that have missed a deadline, and queue those that need not wait any more."""
        if self._deadlines:
            self._end_expired()
        if self.awaiting_grammar.has_compiled:
            self._queue_compiled()
        if self.awaiting_adapter:
            self._queue_with_adapters()

    def _end_expired(self) -> None:
        for request, limit in self._deadlines.expired():
            self._end(request, "timeout", limit)
            self.num_expired += 1

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled, and end those whose grammar failed to compile."""
        for request, compiled in self.awaiting_grammar.admit():
            if request.sequences[0].state is SequenceState.PENDING:  # an interrupt may have come after the next lines
                try:
                    grammar = compiled.result()
                    for sequence in request.sequences:
                        sequence.grammar = grammar.copy()
                    self._queue(request)
                except BaseException as error:
                    self.fail(request, error)
                    if isinstance(error, FATAL_ERRORS):
                        raise
            self.awaiting_grammar.discard(request.request_id)

    def _queue_with_adapters(self) -> None:
        """Queue the requests whose adapters are in a slot now, and end those whose adapters could not be read."""
        for request, result in self.awaiting_adapter.admit(self._slots_in_use):
            first = request.sequences[0]
            if isinstance(result, Exception):
                self.fail(request, result)
            elif first.state is SequenceState.PENDING:  # an interrupt may have come after the next lines
                for sequence in request.sequences:
                    sequence.use_adapter(result, self._adapters.digest(sequence.adapter_key))
                self._scheduler.add(first)
            self.awaiting_adapter.discard(request.request_id)

    def wait_for_work(self) -> None:
        """Wait for a moment if requests wait for their grammars alone, and there is no output to deliver."""
        if self._undelivered or self.awaiting_grammar.has_compiled:
            return
        if self.awaiting_grammar:
            time.sleep(IDLE_WAIT_S)
        elif self.awaiting_adapter:
            self.awaiting_adapter.wait(IDLE_WAIT_S)

    def abort(self, request_id: str, error: BaseException | None = None) -> Output | None:
        """End a request and return its last output, see :meth:`fastinfer.engine.engine.Engine.abort`."""
        if (request := self.active.get(request_id)) is not None:
            if error is None:
                self._end(request, "abort")
            else:
                self.fail(request, error)
        return self._undelivered.pop(request_id, None)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error; its output is kept for later, because the current step may still raise."""
        self._end(request, "error", describe_error(error))

    def discard(self, request: Request, error: BaseException) -> None:
        """End a request that failed at an arbitrary point, and repair what that may have left half done.

        Raises:
            BaseException: the error itself, if it was meant to end the program.
        """
        self._unpin(request, describe_error(error))
        self._forget(request)
        self.repair()
        made = self._undelivered.get(request.request_id)
        if made is None or not made.finished:
            self.deliver_later(request.failure(describe_error(error)))
        if isinstance(error, FATAL_ERRORS):
            raise error

    def repair(self) -> None:
        """Make the queues and the blocks' books consistent after an error at an arbitrary point.

        All running sequences return to the queue. They are computed again, from their blocks in the prefix cache if it
        is on. The same tokens are drawn as without the error.
        """
        self.num_repairs += 1
        pinned = self._pinned_prompts.sequences
        self._block_manager.rebuild([s for s in pinned if s.state is SequenceState.FINISHED])
        every = [sequence for request in self.active.values() for sequence in request.sequences]
        self._scheduler.restart([s for s in every if s.state is not SequenceState.FINISHED])

    def deliver_later(self, output: Output) -> None:
        """Keep a request's output until a step returns it, together with an earlier one that none has returned."""
        missed: Any = self._undelivered.get(output.request_id)
        self._undelivered[output.request_id] = output if missed is None else merge(missed, output)

    def pop_undelivered(self) -> Iterator[Output]:
        """Iterate over the outputs that were kept for later; each is forgotten when the iterator returns it."""
        # The caller stores them all in one call, so that not even an interrupt can lose an output.
        return map(self._undelivered.pop, list(self._undelivered))

    def report(self, request: Request) -> None:
        """Keep a request's output for later, and remove its sequences that have ended, and itself at its end."""
        try:
            output = request.output()
            unfinished = set(request.unfinished)
        except Exception as error:
            output, unfinished = request.failure(describe_error(error)), set()
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED and sequence not in unfinished:
                is_pinned = self._pinned_prompts.holds(sequence)
                if is_pinned:
                    self._block_manager.pin(sequence)  # or what is found could be evicted
                self._scheduler.finish(sequence, keep_blocks=is_pinned)
        if output is not None:
            self.deliver_later(output)
            request.mark_reported()
        if not unfinished:
            del self.active[request.request_id]

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything for a step to compute or to return."""
        return bool(self.active or self._undelivered)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the scheduler's queue, and of requests that wait for their grammar or adapter."""
        return len(self._scheduler.waiting) + len(self.awaiting_grammar) + len(self.awaiting_adapter)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of the sequences and requests that :attr:`num_waiting` counts."""
        not_queued = self.awaiting_grammar.num_tokens + self.awaiting_adapter.num_tokens
        return self._scheduler.num_waiting_tokens + not_queued

    def _is_used(self, request_id: str) -> bool:
        """Return whether a request has this id, or an output of one that has ended."""
        return request_id in self.active or request_id in self._undelivered

    def _queue(self, request: Request) -> None:
        """Queue a request, once its adapter is in a slot if it has one."""
        if request.sequences[0].adapter_key:
            self.awaiting_adapter.add(request)
        else:
            self._scheduler.add(request.sequences[0])

    def _slots_in_use(self) -> set[int]:
        """Return the slots of the adapters of unfinished requests."""
        return {sequence.adapter for request in self.active.values() for sequence in request.sequences}

    def _stop_waiting(self, request_id: str) -> None:
        """Remove a request from those that wait for a grammar or an adapter."""
        self.awaiting_grammar.discard(request_id)
        self.awaiting_adapter.discard(request_id)

    def _end(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> None:
        """End a request; its last output is kept for later."""
        try:
            self._stop_waiting(request.request_id)
            request.finish(finish_reason, stop_reason)
            self._unpin(request, stop_reason)
            self.report(request)
        except BaseException as error:
            self.discard(request, error)

    def _unpin(self, request: Request, stop_reason: str | None) -> None:
        """Remove the pinned prompt of a request, if it is one, which may fail long after the user has pinned it."""
        for name in self._pinned_prompts.forget(request.sequences):
            if stop_reason is not None:
                LOG.warning("pinned prompt %r was not computed and is lost: %s", name, stop_reason)

    def _forget(self, request: Request) -> None:
        """Remove a request from the tables, but not from the queues and the block manager."""
        self.active.pop(request.request_id, None)
        self._stop_waiting(request.request_id)
        self._pinned_prompts.forget(request.sequences)
        for sequence in request.sequences:
            sequence.state = SequenceState.FINISHED
            sequence.forget_cache()
