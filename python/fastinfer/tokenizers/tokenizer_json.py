"""Checks of a tokenizer.json before the tokenizers library reads it: the library trusts the file.

Of a damaged or hostile file it may end the process (an allocation that is too large, a panic during a panic), or take
time and memory without bound for a short text.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.tokenizers.linear_patterns import PatternError, check_pattern
from fastinfer.tokenizers.pre_tokenizers import LINEAR_FORMS

MAX_STEPS = 100
MAX_GROWTH = 100  # characters per character of a text; U+FDFA becomes 18, the longest one of NFKC

_SECTION = re.compile(r'"(normalizer|pre_tokenizer|post_processor|decoder)"\s*:\s*(?=\{)')
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"(?!")')
_ESCAPED_LETTER = re.compile(r"\\u00(5[fF]|[67][0-9a-fA-F])")  # one of the keys of JSON, or "_"


def checked_tokenizer_json(text: str, path: Path) -> str:
    """Check a file's text, and return it with linear forms of expressions that are known to take too long.

    Only what is dangerous is looked at, and found by its key, because parsing a vocabulary takes half as long as
    loading it.

    Raises:
        CheckpointFormatError: a part is malformed.
        UnsupportedModelError: a part is not supported: a text may take too much time or memory.
    """
    # Keys could be spelled with escapes. No program writes letters like that, so this changes hostile files only.
    text = _ESCAPED_LETTER.sub(lambda match: chr(int(match[1], 16)), text)
    for expression, linear in LINEAR_FORMS.items():
        text = text.replace(json.dumps(expression), json.dumps(linear))
    if _PREFIX.search(text):
        # The library cuts it off pieces that may be shorter, and ends the process.
        raise UnsupportedModelError(f"{path}: model.continuing_subword_prefix is not supported")
    for match in _SECTION.finditer(text):
        try:
            section, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            raise CheckpointFormatError(f"{path}: {match[1]}: not JSON: {error}") from None
        _check_section(section, f"{path}: {match[1]}")
    return text


def _check_section(section: Any, place: str) -> None:
    growth = 1.0
    for count, (step, name) in enumerate(_objects(section, place)):
        if count > MAX_STEPS * 10:
            raise UnsupportedModelError(f"{place}: expected at most {MAX_STEPS * 10} objects")
        if isinstance(pattern := step.get("pattern"), dict):
            _check_pattern(pattern, f"{name}.pattern")
        growth *= _growth(step, name)
        if growth > MAX_GROWTH:
            raise UnsupportedModelError(f"{name}: a text may grow more than {MAX_GROWTH}-fold")
    if section.get("type") == "TemplateProcessing":
        _check_template(section, place)


def _objects(value: Any, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """All objects inside a value, with their places."""
    if isinstance(value, dict):
        yield value, name
        for key, inner in value.items():
            yield from _objects(inner, f"{name}.{key[:40]}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _objects(inner, f"{name}[{index}]")


def _check_pattern(pattern: dict[str, Any], name: str) -> None:
    for kind, value in pattern.items():
        if value == "":
            raise CheckpointFormatError(f"{name}: expected at least one character")
        if kind == "Regex" and isinstance(value, str):
            try:
                check_pattern(value)
            except PatternError as error:
                raise UnsupportedModelError(f"{name}: a search may take too long: {error}") from None


def _growth(step: dict[str, Any], name: str) -> float:
    """Return how many times longer a step may make a text."""
    match step:
        case {"type": "Replace", "pattern": dict() as pattern, "content": str() as content}:
            replaced = pattern.get("String")  # or a regular expression, which may match one character
            return max(1.0, len(content) / len(replaced if isinstance(replaced, str) and replaced else "?"))
        case {"type": "Prepend", "prepend": str() as content}:
            return max(1.0, len(content))
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return _longest_replacement(charsmap, name)
        case {"type": "ByteLevel" | "Metaspace"}:
            return 2.0  # bytes become characters of two bytes; words get a character in front
        case _:
            return 1.0


def _longest_replacement(charsmap: Any, name: str) -> float:
    """Read SentencePiece's table: the bytes of a trie, preceded by their number, and texts that end with a zero."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError):
        raise CheckpointFormatError(f"{name}.precompiled_charsmap: expected base64") from None
    size = int.from_bytes(data[:4], "little")
    if size % 4 or not 4 <= size <= len(data) - 4:
        raise CheckpointFormatError(
            f"{name}.precompiled_charsmap: expected a trie inside {len(data)} bytes, got {size}"
        )
    return float(max(1, *map(len, data[4 + size :].split(b"\0"))))


def _check_template(section: dict[str, Any], place: str) -> None:
    """Check that the special tokens of a template are defined."""
    defined = section.get("special_tokens")
    for name in ("single", "pair"):
        pieces = section.get(name) or []
        if not isinstance(pieces, list):
            raise CheckpointFormatError(f"{place}.{name}: expected a list, got {pieces!r:.80}")
        for piece in pieces:
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            token = special.get("id") if isinstance(special, dict) else None
            if token is not None and not (isinstance(token, str) and isinstance(defined, dict) and token in defined):
                raise CheckpointFormatError(f"{place}.{name}: the special token {token!r:.80} is not in special_tokens")
