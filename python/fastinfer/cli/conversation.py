"""The messages of a chat, and how they are saved and loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.utils.regular_file import read_regular

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, which may be empty; reasoning is shown but is no part of the conversation."""

    text: str
    is_reasoning: bool = False


class Conversation:
    """Messages of a chat, the first of which may be a system message.

    Args:
        system: the system message; ``None`` for none.

    Attributes:
        messages: the messages, each with a ``role`` and its ``content``.
    """

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; ``None`` removes it."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    def reset(self) -> None:
        """Forget everything except the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path: Path) -> None:
        """Write the messages as JSON.

        Raises:
            RequestError: the file cannot be written, or exists and is no conversation.
        """
        if path.exists():
            _read(path)
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror}") from None
        except ValueError as error:  # no path, or a lone surrogate in a message
            raise RequestError(f"{str(path)!r}: {error}") from None

    def load(self, path: Path) -> None:
        """Replace the messages by those of a file that :meth:`save` has written.

        Raises:
            RequestError: the file cannot be read, or is no conversation.
        """
        self.messages = _read(path)


def _read(path: Path) -> list[dict[str, str]]:
    try:
        messages = json.loads(read_regular(path).decode())
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        messages = None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise RequestError(f"{path}: expected a conversation as /save writes it, got something else")
    return messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ROLES
        and isinstance(value["content"], str)
    )
