"""Readers of tool calls, for each form of :mod:`.spec` that is written as values. See :mod:`.value_reader`.

All of them raise MalformedError where the text is no call. A call that has begun by then stays incomplete.
"""

import json
from collections.abc import Generator

from fastinfer.server.parsing.call_writer import CallWriter
from fastinfer.server.parsing.spec import ArgumentsObject, CallObjects, PythonCalls
from fastinfer.server.parsing.value_reader import (
    PYTHON,
    MalformedError,
    Reader,
    expect,
    read_blanks,
    read_string,
    read_value,
    read_word,
)


def read_calls(
    content: CallObjects | ArgumentsObject | PythonCalls, calls: CallWriter, name: str, known_only: bool
) -> Generator[None, str, str]:
    """Read the calls of a region, and return the first character behind them.

    Args:
        content: how they are written.
        calls: where they go.
        name: the tool's name, if the region's opening marker has it.
        known_only: whether other names than those of the request's tools are malformed.
    """
    character = yield from read_blanks((yield), _ignore)
    match content:
        case CallObjects():
            return (yield from _read_call_objects(character, content, calls, known_only))
        case ArgumentsObject():
            expect(character, "{")
            calls.start(name, known_only)
            return (yield from read_value(character, calls.write, content.syntax))
        case PythonCalls():
            return (yield from _read_python_calls(character, calls, known_only))


def _ignore(text: str) -> None:
    """Drop the text."""


def _read_call_objects(character: str, content: CallObjects, calls: CallWriter, known_only: bool) -> Reader:
    """Read one object, several, or a list of objects."""
    if character != "[":
        while True:
            character = yield from _read_call_object(character, content, calls, known_only)
            if not content.separator:
                return character
            character = yield from read_blanks(character, _ignore)
            if character != content.separator:
                return character
            character = yield from read_blanks((yield), _ignore)
    while True:
        character = yield from read_blanks((yield), _ignore)
        character = yield from _read_call_object(character, content, calls, known_only)
        character = yield from read_blanks(character, _ignore)
        expect(character, ",]")
        if character == "]":
            return (yield)


def _read_call_object(character: str, content: CallObjects, calls: CallWriter, known_only: bool) -> Reader:
    """Read one call. Arguments that come before the name are kept until it is known."""
    expect(character, "{")
    name: str | None = None
    kept: list[str] | None = None
    is_started = False
    while True:
        key: list[str] = []
        character = yield from read_blanks((yield), _ignore)
        character = yield from read_string(character, key.append, content.syntax)
        character = yield from read_blanks(character, _ignore)
        expect(character, ":")
        character = yield from read_blanks((yield), _ignore)
        match json.loads("".join(key)):
            case content.name if name is None:
                letters: list[str] = []
                character = yield from read_string(character, letters.append, content.syntax)
                name = json.loads("".join(letters))
                if kept is not None:
                    calls.start(name, known_only)
                    calls.write("".join(kept))
                    is_started = True
            case other if other in content.arguments and kept is None:
                expect(character, "{")
                kept = []
                if name is not None:
                    calls.start(name, known_only)
                    is_started = True
                emit = calls.write if is_started else kept.append
                character = yield from read_value(character, emit, content.syntax)
            case other if other in content.ignored:
                character = yield from read_value(character, _ignore, content.syntax)
            case other:
                raise MalformedError(f"expected a key of a call, got {other!r:.40}")
        character = yield from read_blanks(character, _ignore)
        expect(character, ",}")
        if character == "}":
            break
    if name is None:
        raise MalformedError("expected the name of a tool, got a call without one")
    if not is_started:
        calls.start(name, known_only)
        calls.write("{}")
    return (yield)


def _read_python_calls(character: str, calls: CallWriter, known_only: bool) -> Reader:
    """Read a list of calls with keyword arguments."""
    expect(character, "[")
    while True:
        character = yield from read_blanks((yield), _ignore)
        name, character = yield from read_word(character)
        expect(character, "(")
        calls.start(name, known_only)
        calls.write("{")
        character = yield from read_blanks((yield), _ignore)
        separator = ""
        while character != ")":
            key, character = yield from read_word(character)
            character = yield from read_blanks(character, _ignore)
            expect(character, "=")
            calls.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            character = yield from read_blanks((yield), _ignore)
            character = yield from read_value(character, calls.write, PYTHON)
            character = yield from read_blanks(character, _ignore)
            expect(character, ",)")
            if character == ",":
                character = yield from read_blanks((yield), _ignore)
            separator = ", "
        calls.write("}")
        character = yield from read_blanks((yield), _ignore)
        expect(character, ",]")
        if character == "]":
            return (yield)
