"""Reading and tokenising of text files, and the sections in which models are evaluated on them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastinfer.errors import RequestError

if TYPE_CHECKING:
    from fastinfer.tokenizers.tokenizer import Tokenizer

# Characters of a text that are tokenised at first for each token that is wanted; English has 4 to 5.
CHARS_PER_TOKEN = 6
# Tokens at the end of a part that are not used: what follows the part in the text may change the last ones.
CUT_TOKENS = 64

_SPACE = re.compile(r"\s")


@dataclass(frozen=True)
class Sections:
    """Sections of a text, of equal length, each of which is computed by itself.

    Attributes:
        ids: token ids of each section, which begins with the tokens that the model expects before a text.
        given: number of tokens at the start of each section that are not predicted: those before the text, or if there
            are none, its first token.
    """

    ids: list[list[int]]
    given: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sections."""
        return sum(map(len, self.ids))


def read_text(path: str) -> str:
    """Return the content of a text file.

    Raises:
        RequestError: the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected text in UTF-8, got {error.reason} at byte {error.start}") from None


def read_sections(path: str, tokenizer: "Tokenizer", length: int, max_tokens: int | None = None) -> Sections:
    """Cut a text file into sections, whose content is plain text even where it looks like a special token.

    Args:
        path: path of the file.
        tokenizer: tokenizer of the model.
        length: tokens of a section; a shorter rest at the end of the text is left out.
        max_tokens: largest number of tokens of all sections; ``None`` for the whole text.

    Raises:
        RequestError: the file cannot be read or is not UTF-8, or it or ``max_tokens`` is shorter than one section.
    """
    prefix = tokenizer.prefix
    step = length - len(prefix)
    if step < 1:
        raise RequestError(f"sections must have more tokens than the {len(prefix)} before a text, got {length}")
    if max_tokens is not None and max_tokens < length:
        raise RequestError(f"max_tokens must be at least {length}, those of one section, got {max_tokens}")
    wanted = None if max_tokens is None else max_tokens // length * step
    ids = _encode_beginning(read_text(path), tokenizer, wanted)
    found = [[*prefix, *ids[start : start + step]] for start in range(0, len(ids) - step + 1, step)]
    if not found:
        raise RequestError(f"{path}: the text must have at least {step} tokens, got {len(ids)}")
    return Sections(found, max(1, len(prefix)))


def _encode_beginning(text: str, tokenizer: "Tokenizer", max_tokens: int | None) -> list[int]:
    """Return the first ``max_tokens`` tokens of a text, or all.

    Only as much of the text is tokenised as is needed: a part that ends behind white space, without its last tokens.
    """
    size = len(text) if max_tokens is None else CHARS_PER_TOKEN * (max_tokens + CUT_TOKENS)
    while True:
        space = _SPACE.search(text, size)
        end = len(text) if space is None else space.end()
        ids = tokenizer.encode(text[:end], add_special_tokens=False, parse_special=False)
        if end == len(text):
            return ids[:max_tokens]
        if max_tokens is not None and len(ids) >= max_tokens + CUT_TOKENS:
            return ids[:max_tokens]
        size = 2 * end
