"""The requests that wait for their grammars."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from fastinfer.engine.grammar import Grammar
from fastinfer.engine.request import Request
from fastinfer.engine.waiting_requests import WaitingRequests


class GrammarQueue:
    """Requests whose grammars are being compiled.

    A step takes time in proportion to the number of grammars that have been compiled since the last one, not to the
    number of requests that wait.
    """

    def __init__(self) -> None:
        self._waiting = WaitingRequests()
        # Other threads append to this one. Some of these requests may have ended since.
        self._compiled: deque[tuple[Request, Future[Grammar]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the waiting requests' prompts."""
        return self._waiting.num_tokens

    @property
    def has_compiled(self) -> bool:
        """Whether :meth:`admit` has something to do."""
        return bool(self._compiled)

    def add(self, request: Request, grammar: "Future[Grammar]") -> None:
        """Queue a request.

        Args:
            request: the request.
            grammar: the future of its grammar.
        """
        self._waiting.add(request)
        self._submit(request, grammar)

    def discard(self, request_id: str) -> None:
        """Remove a request, if it is there; its grammar is of no interest any more."""
        self._waiting.pop(request_id)

    def admit(self) -> Iterator[tuple[Request, "Future[Grammar]"]]:
        """Yield the requests whose grammars have been compiled, or have failed to, with the finished futures.

        The caller must remove each of them before it takes the next one.
        """
        while self._compiled:
            request, grammar = self._compiled[0]
            if request in self._waiting:
                yield request, grammar
            self._compiled.popleft()  # not before, or an interrupt could lose it

    def renew_after_fork(self, submit: "Callable[[Request], Future[Grammar]]") -> None:
        """Have all grammars compiled anew in a forked child, which none of the parent's threads reaches.

        Args:
            submit: function that has a request's grammar compiled.
        """
        self._compiled = deque()
        for request in self._waiting.all():
            self._submit(request, submit(request))

    def _submit(self, request: Request, grammar: "Future[Grammar]") -> None:
        grammar.add_done_callback(lambda done: self._compiled.append((request, done)))
