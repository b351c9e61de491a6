"""The unfinished requests: from their arrival until their last output."""

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
from fastinfer.errors import QueueFullError, RequestError, reason

# How long a step waits while nothing can be computed: for a grammar's compiler, or for a batch to fill.
IDLE_WAIT_S = 0.001


class RequestTable:
    """Gives sequences to the scheduler when they can run, and takes them back when they have ended.

    Args:
        scheduler: gets the sequences.
        block_manager: holds their blocks.
        prompt_modules: sequences whose blocks stay when they have ended.
        max_num_waiting: requests that may wait; more are refused.

    Attributes:
        active: unfinished requests by id.
        compiling: grammars that active requests wait for, by the request's id.
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
        """The user's id for a new request, or a number.

        Raises:
            QueueFullError: ``max_num_waiting`` requests wait.
            RequestError: an unfinished request has this id.
        """
        if self.num_waiting >= self._max_num_waiting:
            raise QueueFullError(f"the queue is full: max_num_waiting={self._max_num_waiting} requests wait")
        if request_id is None:
            numbered = (f"request-{number}" for number in self._numbers)
            return next(name for name in numbered if name not in self.active)  # a user may have chosen one of them
        if request_id in self.active or request_id in self._undelivered:
            raise RequestError(f"request_id must be new, got {request_id!r}, which is still running")
        return request_id

    def add(self, request: Request, grammar: Future[Grammar] | None = None) -> str:
        """Queue a request, or let it wait for its grammar first; returns its id."""
        self.active[request.request_id] = request
        if grammar is None:
            self._scheduler.add(request.sequences[0])
        else:
            self.compiling[request.request_id] = grammar
        return request.request_id

    def queue_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled, and end those where that failed."""
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
        """Wait a moment when nothing can be computed yet and there is nothing to deliver."""
        if self._undelivered:
            return
        if self.compiling:
            wait(self.compiling.values(), timeout=IDLE_WAIT_S)
        elif self._scheduler.waiting:
            time.sleep(IDLE_WAIT_S)

    def abort(self, request_id: str) -> Output | None:
        """End a request, see :meth:`fastinfer.engine.engine.Engine.abort`."""
        request = self.active.get(request_id)
        if request is None:
            return self._undelivered.pop(request_id, None)
        self.compiling.pop(request_id, None)
        outputs = self._end(request, "abort")
        return outputs[0] if outputs else None

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request within a step; its output is kept, as the step may still raise."""
        for output in self._end(self.active[request_id], "error", reason(error)):
            self.deliver_later(output)

    def deliver_later(self, output: Output) -> None:
        """Keep a last output for the next step to return."""
        self._undelivered[output.request_id] = output

    def pop_undelivered(self) -> list[Output]:
        """The outputs that have been kept."""
        outputs = list(self._undelivered.values())
        self._undelivered.clear()
        return outputs

    def report(self, requests: Iterable[Request]) -> list[Output]:
        """Return the requests' outputs, and take the sequences that have ended from the scheduler."""
        outputs = []
        for request in requests:
            unfinished = request.unfinished
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED and sequence not in unfinished:
                    is_module = self._prompt_modules.holds(sequence)
                    if is_module:
                        self._block_manager.prefer_blocks_of(
                            sequence
                        )  # other copies of these blocks may go, these are pinned
                    self._scheduler.finish(sequence, keep_blocks=is_module)
            if not unfinished:
                del self.active[request.request_id]
            output = request.output()
            if output is not None:
                outputs.append(output)
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something to compute or to return."""
        return bool(self.active or self._undelivered)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn, and requests that wait for their grammar."""
        return len(self._scheduler.waiting) + len(self.compiling)

    def _end(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> list[Output]:
        request.finish(finish_reason, stop_reason)
        self._prompt_modules.forget(request.sequences)
        return self.report([request])
