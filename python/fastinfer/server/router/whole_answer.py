"""An answer of a replica that is not a stream."""

from dataclasses import dataclass

from fastinfer.client.endpoint import Headers
from fastinfer.server.errors import ABORTED, CODE_HEADER
from fastinfer.server.router.prompts import parse_object
from fastinfer.server.router.replica import Answer
from fastinfer.server.router.routed_request import CONNECTION_HEADERS

QUEUE_FULL = "queue_full"
# Errors of a replica that takes no request now. Others with status 503, as that of a time limit, would come again.
NOT_READY = frozenset({"loading", "draining", "failed", "unavailable", ABORTED, QUEUE_FULL})


@dataclass(frozen=True, eq=False)
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

    @property
    def error_code(self) -> str | None:
        """Code of an error; ``None`` if there is none."""
        for name, value in self.headers:
            if name == CODE_HEADER.lower().encode():
                return value.decode("latin-1")
        error = parse_object(self.body).get("error")
        code = error.get("code") if isinstance(error, dict) else None
        return code if isinstance(code, str) else None

    @property
    def is_refusal(self) -> bool:
        """Whether the replica does not take this request now, so that another one may."""
        return self.status == 503 and self.error_code in NOT_READY


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not about the connection to the replica."""
    return [(name, value) for name, value in headers if name not in CONNECTION_HEADERS]
