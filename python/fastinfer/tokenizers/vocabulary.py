"""A model's tokens: how they are spelled, what bytes they stand for, and which of them are no text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# SentencePiece's spelling of a space.
SPACE = "▁"

# Tokens that end an answer, next to the ids that the file names: chat models end a turn with a token of their own, and
# many files name only one of the two.
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|END_OF_TURN_TOKEN|>",
        "<|endoftext|>",
        "<|end_of_text|>",
    }
)

# Added tokens that structure a conversation although their file calls them text (fine-tuning tools forget the flag):
# text from outside must not be able to spell them. Not "<s>": in Gemma's vocabulary that is HTML, struck through.
MARKER = re.compile(r"<\|.+\|>|<(start|end)_of_turn>|\[/?INST\]")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token, each of whose characters stands for one."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # not spelled in bytes: some files hold a few tokens as they are
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: ``<0x0A>`` is one byte, all others are text with its own sign for a space."""
    if match := _BYTE.fullmatch(token):
        return bytes.fromhex(match[1])
    return metaspace_bytes(token)


def metaspace_bytes(token: str) -> bytes:
    """The bytes of a token of SentencePiece's without byte tokens."""
    return token.replace(SPACE, " ").encode()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a tokenizer's file says of its tokens.

    Attributes:
        tokens: the spelling of each id; ``None`` where an id has no token.
        control: ids of tokens that are no text.
        literal: ids of tokens that are text exactly as they are spelled.
        to_bytes: the bytes of any other token's spelling.
        bos_id, eos_id: the tokens that begin and end a text, ``None`` where the file names none.
        eos_ids: every token that ends an answer.
        prefix, suffix: ids that go around a text with special tokens.
        adds_space: a text begins with a space that is not its own.
        chat_template: the Jinja source, or ``None``.
    """

    tokens: Sequence[str | None]
    control: frozenset[int]
    literal: frozenset[int]
    to_bytes: Callable[[str], bytes]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    adds_space: bool = False
    chat_template: str | None = None
