"""Messages that quote a file or a request stay one printable line."""

import pytest

from fastinfer.errors import MAX_MESSAGE_CHARS, FastinferError, RequestError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("model.gguf: expected 日本, got naïve 👍", "model.gguf: expected 日本, got naïve 👍"),
        ("two\nlines\r\nor\u2028more", "two\\nlines\\r\\nor\\u2028more"),
        ("red \x1b[31m, bell \x07, nothing \0", "red \\x1b[31m, bell \\x07, nothing \\x00"),
        ("half a character \ud800", "half a character \\ud800"),
        ("", ""),
    ],
)
def test_a_message_is_one_line_that_can_be_printed(message: str, shown: str) -> None:
    assert str(RequestError(message)) == shown
    shown.encode()


@pytest.mark.parametrize("length", [MAX_MESSAGE_CHARS, MAX_MESSAGE_CHARS + 1, 10**6])
def test_a_long_message_is_cut_in_the_middle(length: int) -> None:
    message = "model.gguf: " + "x" * (length - 18) + " (end)"
    shown = str(FastinferError(message))
    assert len(shown) == MAX_MESSAGE_CHARS
    assert shown.startswith("model.gguf: xxx")
    assert shown.endswith("xxx (end)")
    assert (shown == message) == (length == MAX_MESSAGE_CHARS)
