"""Reading and tokenising of text files."""

from pathlib import Path
from typing import TYPE_CHECKING

from fastinfer.errors import RequestError

if TYPE_CHECKING:
    from fastinfer.tokenizers.tokenizer import Tokenizer


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


def read_tokens(path: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the token ids of a text file, whose content is plain text even where it looks like a special token.

    Raises:
        RequestError: the file cannot be read or is not UTF-8.
    """
    return tokenizer.encode(read_text(path), parse_special=False)
