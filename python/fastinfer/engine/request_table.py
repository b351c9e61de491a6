"""The table of unfinished requests, from their arrival to their last output."""

import itertools
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.prompt_modules import PromptModules
from fastinfer.engine.request import Output, Request
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import SequenceState
from fastinfer.errors import QueueFullError, RequestError, describe_error

# How long a step waits if nothing can be computed yet because a grammar is being compiled or a batch is not full.
IDLE_WAIT_S = 0.001


class RequestTable:
    """Passes the sequences of requests to the scheduler when they can run, and removes them when they have ended.

    Args:
        scheduler: scheduler of the sequences.
        block_manager: manager of the sequences' blocks.
        prompt_modules: sequences that keep their blocks when they have ended.
        max_num_waiting: maximum number of waiting requests; further ones are refused.

    Attributes:
        active: unfinished requests by id.
        compiling: grammars that unfinished requests are waiting for, by the request's id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        block_manager: BlockManager,
        prompt_modules: PromptModules,
        max_num_waiting: int,
    ) -> None:
        self.active: dict[str, Request] = {}
        self.compiling: dict[str, Future[Grammar]] = {}
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._prompt_modules = prompt_modules
        self._max_num_waiting = max_num_waiting
        self._undelivered: dict[str, Output] = {}  # last outputs that no step has returned yet
        self._numbers = itertools.count()

    def new_id(self, request_id: str | None) -> str:
        """Return an id for a new request: the user's if given, otherwise a generated one.

        Raises:
            QueueFullError: ``max_num_waiting`` requests are waiting already.
            RequestError: an unfinished request has the user's id.
        """
        if self.num_waiting >= self._max_num_waiting:
            raise QueueFullError(f"the queue is full: max_num_waiting={self._max_num_waiting} requests wait")
        if request_id is None:
            numbered = (f"request-{number}" for number in self._numbers)
            return next(name for name in numbered if name not in self.active)  # users may have chosen such ids
        if request_id in self.active or request_id in self._undelivered:
            raise RequestError(f"request_id must be new, got {request_id!r}, which is still running")
        return request_id

    def add(self, request: Request, grammar: Future[Grammar] | None = None) -> str:
        """Queue a request, after its grammar has been compiled if it has one, and return its id."""
        self.active[request.request_id] = request
        if grammar is None:
            self._scheduler.add(request.sequences[0])
        else:
            self.compiling[request.request_id] = grammar
        return request.request_id

    def queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled, and end those whose grammar failed to compile."""
        for request_id in [name for name, future in self.compiling.items() if future.done()]:
            request, future = self.active[request_id], self.compiling.pop(request_id)
            try:
                grammar = future.result()
                for sequence in request.sequences:
                    sequence.grammar = grammar.copy()
            except Exception as error:
                self.fail(request_id, error)
            else:
                self._scheduler.add(request.sequences[0])

    def wait_for_work(self) -> None:
        """Wait for a moment if requests exist but none can be computed yet, and there is no output to deliver."""
        if self._undelivered:
            return
        if self.compiling:
            wait(self.compiling.values(), timeout=IDLE_WAIT_S)
        elif self._scheduler.waiting:
            time.sleep(IDLE_WAIT_S)

    def abort(self, request_id: str) -> Output | None:
        """End a request and return its last output, see :meth:`fastinfer.engine.engine.Engine.abort`."""
        request = self.active.get(request_id)
        if request is None:
            return self._undelivered.pop(request_id, None)
        self.compiling.pop(request_id, None)
        outputs = self._end(request, "abort")
        return outputs[0] if outputs else None

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error; its output is kept for later, because the current step may still raise."""
        for output in self._end(self.active[request_id], "error", describe_error(error)):
            self.deliver_later(output)

    def deliver_later(self, output: Output) -> None:
        """Keep a request's last output until a step returns it."""
        self._undelivered[output.request_id] = output

    def pop_undelivered(self) -> list[Output]:
        """Return the outputs that were kept for later, and forget them."""
        outputs = list(self._undelivered.values())
        self._undelivered.clear()
        return outputs

    def report(self, requests: Iterable[Request]) -> list[Output]:
        """Return the outputs of the requests, and remove sequences and requests that have ended."""
        outputs = []
        for request in requests:
            unfinished = request.unfinished
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED and sequence not in unfinished:
                    is_module = self._prompt_modules.holds(sequence)
                    if is_module:
                        # Other blocks with this content may be reused at any time; these stay.
                        self._block_manager.prefer_blocks_of(sequence)
                    self._scheduler.finish(sequence, keep_blocks=is_module)
            if not unfinished:
                del self.active[request.request_id]
            output = request.take_output()
            if output is not None:
                outputs.append(output)
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything for a step to compute or to return."""
        return bool(self.active or self._undelivered)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the scheduler's queue, and of requests whose grammar is being compiled."""
        return len(self._scheduler.waiting) + len(self.compiling)

    def _end(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> list[Output]:
        """End a request and return its last output, if it has one."""
        request.finish(finish_reason, stop_reason)
        self._prompt_modules.forget(request.sequences)
        return self.report([request])
