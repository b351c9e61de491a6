"""Control tokens that somebody has spelled out in a message, and that must stay text."""

import re
import secrets
from typing import Any


class LiteralTokens:
    """Hides the spellings of control tokens while a chat template is rendered.

    A template joins its own control tokens and the texts of the messages to one text, in which both look the same. So
    each spelling in a message is replaced by a random name first, and put back as plain text afterwards.

    Args:
        pattern: expression that matches the spellings; ``None`` for a tokenizer without control tokens.

    Attributes:
        end_mark: a name that stands for nothing, to find a place in the rendered text.
    """

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._name = secrets.token_hex(16)  # letters and digits, which JSON and filters of templates leave as they are
        self._spellings: list[str] = []
        self.end_mark = f"{self._name}end"

    def hide(self, value: Any) -> Any:
        """Return a JSON value in whose strings and keys all spellings are replaced by names."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(self._replace, value)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return {self.hide(key): self.hide(item) for key, item in value.items()} if isinstance(value, dict) else value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the pieces of a rendered text, and whether the control tokens in each are meant as such."""
        if not self._spellings:
            return [(text, True)]
        parts = re.split(rf"{self._name}n(\d+)n", text)
        texts = [(part, True) for part in parts[::2]]
        literals = [(self._spellings[int(number)], False) for number in parts[1::2]]
        pieces = [piece for pair in zip(texts, literals, strict=False) for piece in pair] + [texts[-1]]
        return [piece for piece in pieces if piece[0]]

    def _replace(self, match: re.Match[str]) -> str:
        self._spellings.append(match[0])
        return f"{self._name}n{len(self._spellings) - 1}n"
