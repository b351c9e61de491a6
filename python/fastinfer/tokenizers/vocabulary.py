"""Vocabulary of a model: spellings of its tokens, their bytes, and which of them are not text."""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

# Spelling of a space in SentencePiece.
SPACE = "▁"

# Tokens that end an answer, in addition to those that the file names: chat models have a token for the end of a turn
# and one for the end of a text, and many files name only one of them.
_END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|END_OF_TURN_TOKEN|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
    }
)
# In OpenAI's harmony format these end an answer. Its <|end|> ends each message of one, the reasoning for example.
_HARMONY_END_TOKENS = frozenset({"<|return|>", "<|call|>"})

# Added tokens that structure a conversation, even if their file marks them as text (fine-tuning tools forget the flag):
# untrusted text must not be able to spell them. Not "<s>", which is HTML in Gemma's vocabulary (strike-through).
MARKER = re.compile(r"<\|.+\|>|<(start|end)_of_turn>|\[/?INST\]")

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def end_tokens(special: Set[str]) -> frozenset[str]:
    """Return the tokens that end an answer even if no file names them.

    Args:
        special: spellings of the vocabulary's special tokens.
    """
    if special >= _HARMONY_END_TOKENS:
        return frozenset(special & (_END_TOKENS | _HARMONY_END_TOKENS) - {"<|end|>"})
    return frozenset(special & _END_TOKENS)


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable Latin-1 characters are themselves, other bytes are U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token, in which each character stands for one byte."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # some files spell a few tokens as plain text
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Return a SentencePiece token's bytes: ``<0x0A>`` is one byte, others are text with ``SPACE`` for a space."""
    if match := _BYTE.fullmatch(token):
        return bytes.fromhex(match[1])
    return metaspace_bytes(token)


def metaspace_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece token in a vocabulary without byte tokens."""
    return token.replace(SPACE, " ").encode()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens of a model, as its tokenizer file defines them.

    Attributes:
        tokens: spelling of each id; ``None`` for an id without a token.
        control: ids of tokens that are not text.
        literal: ids of tokens whose spelling is their text.
        to_bytes: function from the spelling of any other token to its bytes.
        bos_id, eos_id: tokens that begin and end a text; ``None`` if the file does not name them.
        eos_ids: all tokens that end an answer.
        prefix, suffix: ids added before and after a text with special tokens.
        adds_space: whether encoding adds a space in front of a text.
        chat_template: Jinja source, or ``None``.
        response_template: description of the model's answers in ``tokenizer_config.json``, or ``None``; see
            https://huggingface.co/docs/transformers/chat_response_parsing.
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
    response_template: Any = None
