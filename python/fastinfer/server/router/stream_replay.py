"""A stream that goes on on another replica: what the client has already got is left out.

The text of an answer depends on its request alone, so another replica writes the same stream, except for its id, its
time, and where it is cut into chunks. What has been sent is counted per choice and kind of content, and the same amount
of the new stream is dropped.
"""

from typing import Any

import orjson

from fastinfer.errors import ServerError
from fastinfer.server.errors import ABORTED, ENGINE_DEAD
from fastinfer.server.sse import DONE, frame

# Fields of a chunk that name the answer rather than say something.
_HEAD = ("id", "created")
# Fields about the prompt, which only the first chunk of a choice or of a stream has.
_PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")


class DivergedError(Exception):
    """The other replica writes another text, or ends it earlier: it has another model, or other kernels."""


class StreamReplay:
    """Follows a stream of chunks of a chat or of completions, and takes it up again.

    Attributes:
        has_begun: whether anything but comments has been sent.
        is_done: whether the stream has been sent to its end.
        is_aborted: whether the replica has ended the stream because it shuts down, or because its engine has died.
    """

    def __init__(self) -> None:
        self.has_begun = self.is_done = self.is_aborted = False
        self._is_replay = False
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._has_usage = False
        self._rest = b""

    def restart(self) -> None:
        """Expect the same stream from the beginning."""
        self._is_replay = self.has_begun
        self._rest = b""
        self.is_aborted = False
        for choice in self._choices.values():
            choice.restart()

    def push(self, data: bytes) -> bytes:
        """Take a piece of the stream, and return whole frames for the client.

        Raises:
            DivergedError: a replayed text is not the one that has been sent.
            ServerError: it is no stream of chunks.
        """
        end = (self._rest + data).rfind(b"\n\n") + 2
        if end < 2:
            self._rest += data
            return b""
        whole, self._rest = (self._rest + data)[:end], (self._rest + data)[end:]
        parts = []
        for event in whole.split(b"\n\n")[:-1]:
            if self.is_aborted or self.is_done:
                break
            parts.append(self._frame(event + b"\n\n"))
        return b"".join(parts)

    def _frame(self, data: bytes) -> bytes:
        """Return what the client gets for one frame."""
        if not data.startswith(b"data: "):  # a comment
            return data
        if data == DONE:
            self.is_done = self.has_begun = True
            return data
        try:
            chunk = orjson.loads(data[6:])
            if "error" in chunk:
                self.is_aborted = chunk["error"].get("code") in (ABORTED, ENGINE_DEAD)
                if self.is_aborted:
                    return b""
                self.has_begun = True
                return data
            rest = self._rest_of(chunk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"expected a stream of chunks, got {data[:80]!r}") from error
        self.has_begun = True
        if not self._is_replay:
            return data
        return b"" if rest is None else frame(rest)

    def _rest_of(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Take note of a chunk, and return what is new in it; ``None`` if nothing is."""
        self._head = self._head or {name: chunk[name] for name in _HEAD if name in chunk}
        choices = []
        is_first = not self._choices
        for choice in chunk["choices"]:
            state = self._choices.setdefault(choice["index"], _Choice())
            if (rest := state.rest_of(choice)) is not None:
                choices.append(rest)
        if not chunk["choices"]:
            if self._has_usage:
                return None
            self._has_usage = True
        elif not choices:
            return None
        rest = {**chunk, **self._head, "choices": choices}
        return rest if is_first else {name: value for name, value in rest.items() if name not in _PROMPT_FIELDS}


class _Choice:
    """Record of what has been sent of one choice."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Any, ...], list[str]] = {}
        self._num_sent: dict[tuple[Any, ...], int] = {}
        self._to_skip: dict[tuple[Any, ...], str] = {}
        self._num_to_skip: dict[tuple[Any, ...], int] = {}
        self._marks: set[tuple[Any, ...]] = set()

    def restart(self) -> None:
        """Skip what has been sent from now on."""
        self._to_skip = {key: "".join(parts) for key, parts in self._sent.items()}
        self._num_to_skip = dict(self._num_sent)

    def rest_of(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Take note of a choice of a chunk, and return what is new in it; ``None`` if nothing is."""
        if ("end",) in self._marks:
            return None
        rest = dict(choice)
        is_new = self._is_new("begin")
        if not is_new:
            for name in _PROMPT_FIELDS:
                rest.pop(name, None)
        if "text" in choice:
            rest["text"] = self._text(choice["text"], "text")
            is_new |= bool(rest["text"])
        else:
            rest["delta"] = self._delta(choice["delta"])
            is_new |= bool(rest["delta"])
        if choice.get("token_ids") is not None:
            rest["token_ids"] = self._list(choice["token_ids"], "token_ids")
            is_new |= bool(rest["token_ids"])
        if choice.get("logprobs") is not None:
            rest["logprobs"] = self._lists(choice["logprobs"])
            is_new |= any(rest["logprobs"].values())
        if choice.get("finish_reason") is not None:
            if any(self._to_skip.values()):
                raise DivergedError
            is_new |= self._is_new("end")
        return rest if is_new else None

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        is_first = "role" in delta and self._is_new("role")
        if is_first:
            rest["role"] = delta["role"]
        for name, value in delta.items():
            if name == "tool_calls":
                calls = [call for call in map(self._call, value) if call is not None]
                if calls:
                    rest[name] = calls
            elif name != "role":
                text = self._text(value or "", name)
                if text or is_first:
                    rest[name] = text
        return rest

    def _call(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """Return what is new in a part of a tool call, which keeps the id that it has been sent with."""
        index, function = call["index"], call["function"]
        arguments = self._text(function.get("arguments", ""), "arguments", index)
        if "id" in call and self._is_new("call", index):
            return {**call, "function": {**function, "arguments": arguments}}
        return {"index": index, "function": {"arguments": arguments}} if arguments else None

    def _text(self, text: str, *key: Any) -> str:
        skipped = self._to_skip.get(key, "")
        if skipped:
            common = min(len(skipped), len(text))
            if skipped[:common] != text[:common]:
                raise DivergedError
            self._to_skip[key] = skipped[common:]
            text = text[common:]
        if text:
            self._sent.setdefault(key, []).append(text)
        return text

    def _list(self, values: list[Any], *key: Any) -> list[Any]:
        skipped = min(self._num_to_skip.get(key, 0), len(values))
        if skipped:
            self._num_to_skip[key] -= skipped
        self._num_sent[key] = self._num_sent.get(key, 0) + len(values) - skipped
        return values[skipped:]

    def _lists(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._list(value, "logprobs", name) if isinstance(value, list) else value
            for name, value in values.items()
        }

    def _is_new(self, *key: Any) -> bool:
        """Mark something that is sent once, and return whether it had not been."""
        is_new = key not in self._marks
        self._marks.add(key)
        return is_new
