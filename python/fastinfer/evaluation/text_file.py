"""Reading and tokenising of text files."""

from pathlib import Path

from fastinfer.errors import RequestError
from fastinfer.tokenizers.tokenizer import Tokenizer


def read_tokens(path: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a text file, whose content is plain text even where it looks like a special token.

    Raises:
        RequestError: the file cannot be read or is not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected text in UTF-8, got {error.reason} at byte {error.start}") from None
    return tokenizer.encode(text, parse_special=False)
