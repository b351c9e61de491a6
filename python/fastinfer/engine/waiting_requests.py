"""Requests that wait for something before they can be scheduled."""

from fastinfer.engine.request import Request


class WaitingRequests:
    """Requests by id, with a running count of their tokens."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._num_tokens: int | None = 0  # None after an interrupted change, until the next one

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the requests' prompts."""
        return sum(map(_num_tokens, self._requests.values())) if self._num_tokens is None else self._num_tokens

    def all(self) -> list[Request]:
        """Return the requests in the order of their arrival."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Add a request whose id no other one has."""
        num_tokens, self._num_tokens = self.num_tokens, None
        self._requests[request.request_id] = request
        self._num_tokens = num_tokens + _num_tokens(request)

    def pop(self, request_id: str) -> Request | None:
        """Remove a request and return it; ``None`` if it is not there."""
        num_tokens, self._num_tokens = self.num_tokens, None
        request = self._requests.pop(request_id, None)
        self._num_tokens = num_tokens - (0 if request is None else _num_tokens(request))
        return request


def _num_tokens(request: Request) -> int:
    return len(request.sequences[0])
