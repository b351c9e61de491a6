"""Sharing of an engine between threads: each thread waits for its own requests, and any of them steps for all."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic

from tqdm import tqdm

from fastinfer.engine.engine import Engine
from fastinfer.errors import QueueFullError
from fastinfer.outputs import Output, merge


class Job(Generic[Output]):
    """A validated request that has not been queued yet.

    Args:
        add: function that queues the request and returns its id.
    """

    def __init__(self, add: Callable[[], str]) -> None:
        self.add = add
        self.request_id = ""


class SharedEngine:
    """Runs the jobs of any number of threads on one engine.

    Attributes:
        lock: lock that a thread must hold while it calls the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.lock = threading.Lock()
        self._engine = engine
        # For each request the inbox of the thread that waits for it. An inbox holds at most one output per request,
        # which reports everything since the one before, so that it stays small while its thread takes none.
        self._inboxes: dict[str, dict[str, Any]] = {}
        self._abandoned: deque[str] = deque()  # ids of requests to abort before the next step

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
        inbox: dict[str, Output] = {}
        queued = deque(jobs)
        pending: set[str] = set()
        try:
            while queued or pending:
                with self.lock:
                    self.abort_abandoned()
                    self._add(queued, pending, inbox)
                    # The steps of other threads may have filled the inbox meanwhile.
                    if not inbox:
                        self._step()
                    arrived = list(map(inbox.pop, list(inbox)))
                for output in arrived:
                    if output.finished:
                        pending.discard(output.request_id)
                        self._inboxes.pop(output.request_id, None)
                    yield output
        finally:
            # The garbage collector closes an abandoned iterator, perhaps while this very thread holds the lock in a
            # step, so waiting for the lock could deadlock. If it is taken, the next step of any thread aborts them.
            self._abandoned.extend(pending)
            if self.lock.acquire(blocking=False):
                try:
                    self.abort_abandoned()
                finally:
                    self.lock.release()

    def _step(self) -> None:
        """Run a step, and put the outputs into the inboxes; the caller holds the lock."""
        for output in self._engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox[output.request_id] = merge(inbox.get(output.request_id), output)
            elif not output.finished:
                self._abandoned.append(output.request_id)  # interrupted before its thread could wait for it

    def _add(self, queued: deque[Job[Output]], pending: set[str], inbox: dict[str, Output]) -> None:
        """Queue as many jobs as the engine accepts; the caller holds the lock."""
        with contextlib.suppress(QueueFullError):
            while queued:
                request_id = queued[0].add()
                queued.popleft().request_id = request_id
                pending.add(request_id)
                self._inboxes[request_id] = inbox

    def abort_abandoned(self) -> None:
        """Abort the requests that nobody waits for; the caller holds the lock."""
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._engine.abort(request_id)
            self._inboxes.pop(request_id, None)
