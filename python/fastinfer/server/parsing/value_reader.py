"""Reads values that a model writes in JSON or in something like it, and gives them out as JSON.

The readers are generators that receive a text character by character. Each begins with the first character of what it
reads and returns the first character behind it, so that nothing is read twice.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from fastinfer.engine.stop_strings import StopStringMatcher

MAX_DEPTH = 100
MAX_SCALAR_CHARS = 4000  # of a number or a bare word; Python reads no longer integers

Reader = Generator[None, str, str]
Emit = Callable[[str], None]

_BLANKS = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*(?:[-.]\w+)*")
_ESCAPES = {c: "\\" + c for c in '"\\/bfnrt'} | {"'": "'", "a": "\\u0007", "v": "\\u000b", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"{": "}", "[": "]", "(": "]"}
_CONSTANTS = {"true": "true", "false": "false", "null": "null"}


class MalformedError(ValueError):
    """The text is not what the format requires."""


@dataclass(frozen=True)
class Syntax:
    """Notation of values.

    Attributes:
        quotes: characters that begin and end a string.
        delimiters: longer pairs of texts that begin and end a string without escape sequences.
        bare_keys: whether the keys of an object may stand without quotes.
        constants: JSON of each word that is a value.
        has_tuples: whether ``(1, 2)`` is a list.
    """

    quotes: str = '"'
    delimiters: tuple[tuple[str, str], ...] = ()
    bare_keys: bool = False
    constants: tuple[tuple[str, str], ...] = tuple(_CONSTANTS.items())
    has_tuples: bool = False


JSON = Syntax()
PYTHON = Syntax(
    quotes="\"'",
    constants=(*_CONSTANTS.items(), ("True", "true"), ("False", "false"), ("None", "null")),
    has_tuples=True,
)


def expect(character: str, expected: str) -> None:
    """Raise MalformedError unless ``character`` is one of the expected ones."""
    if character not in expected:
        raise MalformedError(f"expected one of {expected!r}, got {character!r}")


def read_blanks(character: str, emit: Emit) -> Reader:
    """Read white space, if there is any."""
    while character in _BLANKS:
        emit(character)
        character = yield
    return character


def read_value(character: str, emit: Emit, syntax: Syntax = JSON) -> Reader:
    """Read any value.

    Raises:
        MalformedError: it is malformed, or nested deeper than ``MAX_DEPTH``.
    """
    closing: list[str] = []  # what ends the objects and lists that are open
    ends: list[str] = []  # how it is written
    while True:
        if character in "{[" or (character == "(" and syntax.has_tuples):
            if len(closing) == MAX_DEPTH:
                raise MalformedError(f"expected at most {MAX_DEPTH} levels")
            closing.append(_CLOSING[character])
            ends.append(")" if character == "(" else closing[-1])
            emit("[" if character == "(" else character)
            character = yield from read_blanks((yield), emit)
            if character != ends[-1]:
                if closing[-1] == "}":
                    character = yield from _read_key(character, emit, syntax)
                continue
        else:
            character = yield from _read_scalar(character, emit, syntax)
        # A value has ended, and with it perhaps those around it.
        while closing:
            character = yield from read_blanks(character, emit)
            if character == ends[-1]:
                emit(closing.pop())
                ends.pop()
                character = yield
                continue
            expect(character, ",")
            character = yield
            separator = [","]
            character = yield from read_blanks(character, separator.append)
            if character == ends[-1] and ends[-1] == ")":
                continue  # the comma behind the only element of a tuple
            emit("".join(separator))
            if closing[-1] == "}":
                character = yield from _read_key(character, emit, syntax)
            break
        else:
            return character


def read_string(character: str, emit: Emit, syntax: Syntax = JSON) -> Reader:
    """Read a string.

    Line breaks and other control characters, which JSON does not allow there, are escaped.
    """
    if character in syntax.quotes:
        yield from _read_quoted(character, emit)
        return (yield)
    opening, ending = next((pair for pair in syntax.delimiters if pair[0][0] == character), ("", ""))
    if not opening:
        raise MalformedError(f"expected a string, got {character!r}")
    for expected in opening[1:]:
        expect((yield), expected)
    emit('"')
    matcher = StopStringMatcher((ending,))
    while matcher.matched is None:
        emit(escape(matcher.add((yield))))
    emit('"')
    return (yield)


def read_word(character: str) -> Generator[None, str, tuple[str, str]]:
    """Read a name such as ``get_weather``, and return it with the character behind it."""
    letters: list[str] = []
    while character.isalnum() or character in "_-.":
        letters.append(character)
        if len(letters) > MAX_SCALAR_CHARS:
            raise MalformedError("expected a name, got a longer text")
        character = yield
    word = "".join(letters)
    if not _WORD.fullmatch(word):
        raise MalformedError(f"expected a name, got {word!r:.40}")
    return word, character


def escape(text: str) -> str:
    """Return the text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_key(character: str, emit: Emit, syntax: Syntax) -> Reader:
    """Read a key, the colon, and what is blank around it."""
    if syntax.bare_keys and (character.isalpha() or character == "_"):
        word, character = yield from read_word(character)
        emit(json.dumps(word, ensure_ascii=False))
    else:
        character = yield from read_string(character, emit, syntax)
    character = yield from read_blanks(character, emit)
    expect(character, ":")
    emit(":")
    return (yield from read_blanks((yield), emit))


def _read_scalar(character: str, emit: Emit, syntax: Syntax) -> Reader:
    """Read a string, a number or a constant."""
    if not (character.isalnum() or character == "-"):
        return (yield from read_string(character, emit, syntax))
    letters: list[str] = []
    while character.isalnum() or character in "+-.":
        letters.append(character)
        if len(letters) > MAX_SCALAR_CHARS:
            raise MalformedError("expected a number or a constant, got a longer text")
        character = yield
    text = "".join(letters)
    constant = text if _NUMBER.fullmatch(text) else dict(syntax.constants).get(text)
    if constant is None:
        raise MalformedError(f"expected a value, got {text!r:.40}")
    emit(constant)
    return character


def _read_quoted(quote: str, emit: Emit) -> Generator[None, str, None]:
    """Read a string with escape sequences, up to its last quote."""
    emit('"')
    while (character := (yield)) != quote:
        if character == "\\":
            yield from _read_escape(emit)
        elif character < " " or character == '"':
            emit(escape(character))
        else:
            emit(character)
    emit('"')


def _read_escape(emit: Emit) -> Generator[None, str, None]:
    """Read what follows a backslash."""
    character = yield
    if (count := _HEX_DIGITS.get(character)) is None:
        emit(_ESCAPES.get(character, escape("\\" + character)))
        return
    digits = ""
    for _ in range(count):
        digits += yield
    if not re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits) or int(digits, 16) > 0x10FFFF:
        raise MalformedError(f"expected {count} hexadecimal digits, got {digits!r}")
    emit(f"\\u{digits}" if count == 4 else json.dumps(chr(int(digits, 16)))[1:-1])
