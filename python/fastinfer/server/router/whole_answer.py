"""An answer of a replica that is not a stream."""

from dataclasses import dataclass

from fastinfer.client.endpoint import Headers
from fastinfer.server.router.replica import Answer
from fastinfer.server.router.routed_request import CONNECTION_HEADERS


@dataclass(frozen=True)
class WholeAnswer:
    """A whole answer of a replica.

    Attributes:
        status: its status.
        headers: the headers that are not about the connection to the replica.
        body: its body.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    async def read(cls, answer: Answer) -> "WholeAnswer":
        """Read an answer that has begun.

        Raises:
            ServerError: the connection ends before it does.
        """
        parts = []
        while piece := await answer.read():
            parts.append(piece)
        return cls(answer.status, end_to_end(answer.headers), b"".join(parts))


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not about the connection to the replica."""
    return [(name, value) for name, value in headers if name not in CONNECTION_HEADERS]
