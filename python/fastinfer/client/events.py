"""Server-sent events: the format of streams, https://html.spec.whatwg.org/multipage/server-sent-events.html."""


class EventParser:
    """Takes a stream apart into the data of its events. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that a piece of the stream completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
