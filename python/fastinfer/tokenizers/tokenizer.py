"""Text to token ids and back."""

import codecs
from collections.abc import Callable, Iterable
from pathlib import Path

from fastinfer.errors import RequestError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers import gguf_tokenizer, hf_tokenizer
from fastinfer.tokenizers.vocabulary import Vocabulary

_BEFORE = "\x02"  # a character that no token joins with what follows it


class Tokenizer:
    """A model's tokenizer.

    Args:
        vocabulary: what its tokens are.
        encode: from a text and ``parse_special`` to token ids.

    Attributes:
        vocab_size: number of token ids.
        bos_id, bos_token: the token that begins a text, and its spelling; None and "" if the file names none.
        eos_ids: every token that ends an answer.
        control_ids: the ids that are no text, such as ``<|im_end|>``.
        eos_token: the spelling of the file's own end token, or "".
        chat_template: the file's Jinja template, or None.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str, bool], list[int]]) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self.vocab_size = self._num_ids = len(vocabulary.tokens)
        self.control_ids = vocabulary.control
        self.bos_id = vocabulary.bos_id
        self.bos_token = self._spelling(vocabulary.bos_id)
        self.eos_ids = vocabulary.eos_ids
        self.eos_token = self._spelling(vocabulary.eos_id)
        self.chat_template = vocabulary.chat_template

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """Build the tokenizer of an open file: byte-level BPE or SentencePiece BPE.

        Raises:
            UnsupportedModelError: the file's kind of tokenizer or its pre-tokenizer is not implemented.
            GGUFFormatError: the vocabulary is missing or inconsistent.
        """
        return cls(*gguf_tokenizer.read_tokenizer(file))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Build the tokenizer of a Hugging Face folder from its ``tokenizer.json``; no code of it is run.

        Special tokens and the chat template come from the JSON files next to it.

        Raises:
            CheckpointFormatError: a file is missing or malformed.
            UnsupportedModelError: the tokenizer's decoder is not implemented.
        """
        return cls(*hf_tokenizer.read_tokenizer(folder))

    def pad(self, num_ids: int) -> None:
        """Take ids up to ``num_ids - 1``: those past the vocabulary are no text. Models often have more rows of logits
        than there are tokens, and a random draw may hit one.
        """
        self._num_ids = max(num_ids, self.vocab_size)

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text. Bytes that the vocabulary has no token for are dropped, or become its unknown token, as in
                the models' own tokenizers.
            add_special_tokens: put the beginning-of-text token in front, if the model wants one.
            parse_special: the spelling of a special token (``<|im_end|>``) becomes that token; otherwise it is plain
                text, which is right for text from outside.
            continues: the text goes on after another, as an answer after a prompt: the space that some vocabularies
                put in front of a text is left out.

        Raises:
            RequestError: ``text`` is no str or holds a lone surrogate.
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
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: from the vocabulary.
            skip_special_tokens: leave out the tokens that are no text.
            continues: the ids go on after a text, as an answer after a prompt. False for a text from its beginning: the
                space that some vocabularies put there is taken away, so that this is :meth:`encode` reversed.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        text = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if self._vocabulary.adds_space and not continues else text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token stands for, perhaps a part of a character.

        b"" for a skipped special token, and for an id without a token.
        """
        if not 0 <= token_id < self._num_ids:
            raise RequestError(f"token id: expected 0 to {self._num_ids - 1}, got {token_id}")
        vocabulary = self._vocabulary
        token = vocabulary.tokens[token_id] if token_id < self.vocab_size else None
        if token is None:
            return b""
        if token_id in vocabulary.control:
            return b"" if skip_special_tokens else token.encode()
        return token.encode() if token_id in vocabulary.literal else vocabulary.to_bytes(token)

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._vocabulary.tokens[token_id] or ""


class Detokenizer:
    """Text of a growing answer, token by token.

    A token may end in the middle of a character, so the bytes go through an incremental UTF-8 decoder: it holds back
    what later tokens may complete, 3 bytes at most. A token's cost does not depend on the length of the answer, and all
    pieces joined are exactly what :meth:`Tokenizer.decode` gives for all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The text that this token completes, perhaps ""."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        """What is left at the end of the answer: "" or U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
