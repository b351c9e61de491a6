"""Sharing of an engine between threads: each thread waits for its own requests, and any of them steps for all."""

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic

from tqdm import tqdm

from fastinfer.engine.engine import Engine
from fastinfer.errors import QueueFullError
from fastinfer.outputs import Output, merge
from fastinfer.utils.forks import renew_in_children


class Job(Generic[Output]):
    """A validated request that has not been queued yet.

    Args:
        add: function that queues the request.
        request_id: id of the request.
    """

    def __init__(self, add: Callable[[], str], request_id: str) -> None:
        self.add = add
        self.request_id = request_id


class _Inbox(dict[str, Any]):
    """The outputs that a thread has not taken yet: at most one per request, which reports everything since the last.

    Attributes:
        thread: the thread that waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class SharedEngine:
    """Runs the jobs of any number of threads on one engine.

    In a forked child the requests of the thread that forked go on, and those of other threads are aborted.

    Attributes:
        lock: lock that a thread must hold while it calls the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.Lock()
        self._engine = engine
        self._inboxes: dict[str, _Inbox] = {}  # by request
        self._outputs: deque[Any] = deque()  # on their way to the inboxes
        self._abandoned: deque[str] = deque()  # ids of requests to abort before the next step
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Make the engine usable in a forked child, whatever other threads of the parent were doing with it."""
        self.lock = threading.Lock()
        thread = threading.get_ident()
        self._abandoned.extend(name for name, inbox in self._inboxes.items() if inbox.thread != thread)

    def complete(self, jobs: list[Job[Output]], use_tqdm: bool = False) -> list[Output]:
        """Run jobs to the end and return their last outputs, in the same order."""
        finished = {}
        with tqdm(total=len(jobs), unit="prompt", disable=not use_tqdm) as bar:
            for output in self.run(jobs):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[job.request_id] for job in jobs]

    def run(self, jobs: list[Job[Output]]) -> Generator[Output, None, None]:
        """Run jobs and yield their outputs as they come; leaving early, for any reason, aborts the unfinished jobs."""
        inbox = _Inbox()
        queued = deque(jobs)
        pending: set[str] = set()
        try:
            while queued or pending:
                with self.lock:
                    self._deliver()  # what an interrupted thread has left
                    self.abort_abandoned()
                    self._add(queued, pending, inbox)
                    # The steps of other threads may have filled the inbox meanwhile.
                    if not inbox:
                        self._step()
                    arrived = list(map(inbox.pop, list(inbox)))
                for output in arrived:
                    if output.finished:
                        self._inboxes.pop(output.request_id, None)
                        pending.discard(output.request_id)
                    yield output
        finally:
            # The garbage collector closes an abandoned iterator, perhaps while this very thread holds the lock in a
            # step, so waiting for the lock could deadlock. If it is taken, the next step of any thread aborts them.
            self._abandoned.extend(pending)
            if not self.lock.locked():
                with self.lock:  # unlike a call of acquire(), nothing comes between taking it and the block
                    self.abort_abandoned()

    def _step(self) -> None:
        """Run a step, and put the outputs into the inboxes; the caller holds the lock."""
        self._engine.step_into(self._outputs)
        self._deliver()

    def _deliver(self) -> None:
        """Put outputs into the inboxes; the caller holds the lock."""
        while self._outputs:
            output = self._outputs[0]  # removed last: an interrupt of this thread must not lose another one's output
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox[output.request_id] = merge(inbox.get(output.request_id), output)
            elif not output.finished:
                self._abandoned.append(output.request_id)  # nobody waits for it
            self._outputs.popleft()

    def _add(self, queued: deque[Job[Output]], pending: set[str], inbox: _Inbox) -> None:
        """Queue as many jobs as the engine accepts; the caller holds the lock."""
        while queued:
            job = queued[0]
            pending.add(job.request_id)  # first, because an interrupt must not leave it running for nobody
            self._inboxes[job.request_id] = inbox
            try:
                job.add()
            except QueueFullError:
                del self._inboxes[job.request_id]
                pending.discard(job.request_id)
                break
            queued.popleft()

    def abort_abandoned(self) -> None:
        """Abort the requests that nobody waits for; the caller holds the lock."""
        while self._abandoned:
            request_id = self._abandoned[0]  # forgotten last: an interrupt must not leave it running for nobody
            self._engine.abort(request_id)
            self._inboxes.pop(request_id, None)
            self._abandoned.popleft()
