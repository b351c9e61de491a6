"""Tokenizer of a model: text to token ids and back."""

import codecs
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from fastinfer.errors import RequestError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers import gguf_tokenizer, hf_tokenizer
from fastinfer.tokenizers.vocabulary import Vocabulary
from fastinfer.utils.checks import show

# File of a folder that has the metadata of a GGUF file.
GGUF_TOKENIZER = "tokenizer.gguf"

_BEFORE = "\x02"  # a character that no token combines with the text behind it


class Tokenizer:
    """A model's tokenizer.

    Args:
        vocabulary: tokens of the model.
        encode: function from a text and ``parse_special`` to token ids.

    Attributes:
        vocab_size: number of token ids.
        max_token_length: length in characters of the longest token's spelling, at least 1.
        prefix: ids of the tokens that :meth:`encode` adds before a text, often ``bos_id``.
        bos_id, bos_token: token that begins a text, and its spelling; None and "" if the file names none.
        eos_ids: all tokens that end an answer.
        control_ids: ids of the tokens that are not text, such as ``<|im_end|>``.
        eos_token: spelling of the end token that the file names, or "".
        chat_template: Jinja template of the file, or None.
        response_template: how the checkpoint says that its answers are divided, or None.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str, bool], list[int]]) -> None:
        self._vocabulary = vocabulary
        self._known_bytes: dict[int, bytes] = {}  # of tokens that are always text
        self._encode = encode
        self.vocab_size = self._num_ids = len(vocabulary.tokens)
        self.max_token_length = max(1, *(len(token) for token in vocabulary.tokens if token))
        self.control_ids = vocabulary.control
        self.prefix = vocabulary.prefix
        self.bos_id = vocabulary.bos_id
        self.bos_token = self._spelling(vocabulary.bos_id)
        self.eos_ids = vocabulary.eos_ids
        self.eos_token = self._spelling(vocabulary.eos_id)
        self.chat_template = vocabulary.chat_template
        self.response_template = vocabulary.response_template

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """Build the tokenizer of an open GGUF file: byte-level BPE or SentencePiece BPE.

        Raises:
            UnsupportedModelError: the kind of tokenizer or its pre-tokenizer is not implemented.
            GGUFFormatError: the vocabulary is missing or inconsistent.
        """
        return cls(*gguf_tokenizer.read_tokenizer(file))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Build the tokenizer of a Hugging Face folder from its ``tokenizer.json``; no code of the folder is run.

        Special tokens and the chat template come from the other JSON files of the folder. A folder that was quantised
        from a GGUF file has that file's tokenizer in ``tokenizer.gguf``, which is read if there is no
        ``tokenizer.json``.

        Raises:
            CheckpointFormatError, GGUFFormatError: a file is missing or malformed.
            UnsupportedModelError: the tokenizer's decoder is not implemented.
        """
        if not (folder / "tokenizer.json").exists() and (folder / GGUF_TOKENIZER).exists():
            return cls.from_gguf(GGUFFile(folder / GGUF_TOKENIZER))
        return cls(*hf_tokenizer.read_tokenizer(folder))

    def pad(self, num_ids: int) -> None:
        """Accept ids up to ``num_ids - 1``; those past the vocabulary have no text.

        Models often have more logits than the vocabulary has tokens, and sampling may choose one of these ids.
        """
        self._num_ids = max(num_ids, self.vocab_size)

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        """Encode a text.

        Args:
            text: any text. Bytes without a token in the vocabulary are dropped or become the unknown token, as in the
                models' original tokenizers.
            add_special_tokens: whether to add the tokens that the model expects around a text, such as the
                beginning-of-text token.
            parse_special: whether the spelling of a special token (``<|im_end|>``) becomes that token. Use False for
                untrusted text, to encode it as plain text.
            continues: whether the text continues another one, as an answer continues a prompt. If so, the space that
                some vocabularies add in front of a text is left out.

        Returns:
            The token ids.

        Raises:
            RequestError: ``text`` is not a str, has a lone surrogate, or the tokenizer cannot encode it.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text, got a lone surrogate at position {error.start}") from None
        if continues and self._vocabulary.adds_space:
            ids = self._encode(_BEFORE + text, parse_special)[len(self._encode(_BEFORE, parse_special)) :]
        else:
            ids = self._encode(text, parse_special)
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continues: bool = True) -> str:
        """Decode token ids to text; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids of the vocabulary.
            skip_special_tokens: whether to leave out the tokens that are not text.
            continues: whether the ids continue a text, as an answer continues a prompt. If not, the space that some
                vocabularies add in front of a text is removed, so that this method is the inverse of :meth:`encode`.

        Returns:
            The text.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        text = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if self._vocabulary.adds_space and not continues else text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Return a token's bytes, which may be part of a character; b"" for a skipped special token or an unused id.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        if (known := self._known_bytes.get(token_id)) is not None:
            return known
        if not 0 <= token_id < self._num_ids:
            raise RequestError(f"token id: expected 0 to {self._num_ids - 1}, got {show(token_id)}")
        vocabulary = self._vocabulary
        token = vocabulary.tokens[token_id] if token_id < self.vocab_size else None
        if token is None:
            return b""
        if token_id in vocabulary.control:
            return b"" if skip_special_tokens else token.encode()
        known = token.encode() if token_id in vocabulary.literal else vocabulary.to_bytes(token)
        self._known_bytes[token_id] = known
        return known

    @cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Expression that matches the spelling of any control token; ``None`` if there are none."""
        # The longest one first, as one may begin with another one.
        ordered = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Ids of the control tokens by their spelling."""
        return {spelling: token_id for token_id in sorted(self.control_ids) if (spelling := self._spelling(token_id))}

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._vocabulary.tokens[token_id] or ""


class Detokenizer:
    """Decoder of a growing answer, one token at a time.

    A token may end in the middle of a character, so up to 3 bytes of an incomplete character are held back. The time
    per token does not depend on the length of the answer, and all pieces together equal :meth:`Tokenizer.decode` of
    all ids.

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: whether to leave out the tokens that are not text.
        kept: ids of tokens that are not text and are not left out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, kept: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = frozenset(kept)
        self._incomplete = b""  # the beginning of a character

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes, which may be ""."""
        skips = self._skip_special_tokens and token_id not in self._kept
        data = self._incomplete + self._tokenizer.token_bytes(token_id, skips)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        if num_decoded < len(data) or self._incomplete:
            self._incomplete = data[num_decoded:]
        return text

    def flush(self) -> str:
        """Return the rest of the text at the end of the answer: U+FFFD for an incomplete character, else ""."""
        rest, self._incomplete = self._incomplete, b""
        return rest.decode(errors="replace")
