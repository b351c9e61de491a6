"""Turns the calls that are being read into events."""

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastinfer.server.parsing.argument_types import ArgumentType, ArgumentTypes
from fastinfer.server.parsing.events import Event, ToolCallArguments, ToolCallStart
from fastinfer.server.parsing.value_reader import MalformedError

MAX_NAME_CHARS = 256

_NAME = re.compile(r"[\w.:/-]+")
_LETTERS = string.ascii_letters + string.digits


class CallWriter:
    """Numbers the calls of an answer, and writes their events.

    Args:
        emit: receives the events.
        tools: the tools of the request, as in OpenAI's API; ``None`` if they are not known.
        short_ids: see :class:`~fastinfer.server.parsing.spec.ParserSpec`.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(
        self, emit: Callable[[Event], None], tools: Sequence[Mapping[str, Any]] | None, short_ids: bool = False
    ) -> None:
        self.num_calls = 0
        self._emit = emit
        self._parameters = None if tools is None else dict(map(_name_and_parameters, tools))
        self._short_ids = short_ids
        self._types: dict[str, ArgumentTypes] = {}

    def start(self, name: str, known_only: bool = False) -> None:
        """Begin a call.

        Args:
            name: name of the tool.
            known_only: whether the tool must be one of the request's.

        Raises:
            MalformedError: this is no name of a tool.
        """
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            raise MalformedError(f"expected the name of a tool, got {name!r:.40}")
        if known_only and self._parameters is not None and name not in self._parameters:
            raise MalformedError(f"expected one of {list(self._parameters)!r:.80}, got {name!r:.40}")
        self._emit(ToolCallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def write(self, text: str) -> None:
        """Write more of the last call's arguments."""
        if text:
            self._emit(ToolCallArguments(self.num_calls - 1, text))

    def argument_type(self, name: str, key: str) -> ArgumentType:
        """Return the type of an argument."""
        parameters = (self._parameters or {}).get(name)
        if parameters is None:
            return ArgumentType()
        if name not in self._types:
            self._types[name] = ArgumentTypes(parameters)
        return self._types[name][key]

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _name_and_parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool["function"]
    parameters = function.get("parameters")
    return function["name"], parameters if isinstance(parameters, Mapping) else {}
