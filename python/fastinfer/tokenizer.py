"""Text to token ids and back, with the vocabulary that a GGUF file carries."""

import codecs
from collections.abc import Callable, Iterable

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from fastinfer.errors import GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile

# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4

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

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level()


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit on its own, then as GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    """Runs of up to three digits."""
    return _split(_WORD + r"|\p{N}{1,3}|" + _REST)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_WORD + r"|\p{N}|" + _REST)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


# How text is cut into words before the merges, by the value of tokenizer.ggml.pre. The patterns are those of the
# models' own tokenizers: merges learned on other words would give other ids.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """Byte-level BPE (https://huggingface.co/docs/tokenizers), built from a GGUF file's own vocabulary and merges.

    Attributes:
        vocab_size: number of tokens.
        bos_id, bos_token: the token that begins a text, and its spelling; None and "" if the file names none.
        eos_ids: every token that ends an answer.
        control_ids: the tokens that are no text, such as ``<|im_end|>``.
        eos_token: the spelling of the file's own end token, or "".
        chat_template: the file's Jinja template, or None.
    """

    def __init__(self, file: GGUFFile) -> None:
        tokens = file.get("tokenizer.ggml.tokens", list)
        merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", list)]
        if bad := [merge for merge in merges if len(merge) != 2]:
            raise GGUFFormatError(
                f"{file.path}: metadata key 'tokenizer.ggml.merges': expected pairs, got {bad[0]!r:.90}"
            )
        types = file.get("tokenizer.ggml.token_type", np.ndarray, np.zeros(len(tokens), np.int32))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise GGUFFormatError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of the vocabulary occur twice")
        if len(types) != len(tokens):
            raise GGUFFormatError(f"{file.path}: expected {len(tokens)} token types, got {len(types)}")
        pre = file.get("tokenizer.ggml.pre", str, "default")
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedModelError(
                f"pre-tokenizer {pre!r} is not supported; known are {', '.join(PRE_TOKENIZERS)}"
            )

        self.vocab_size = len(tokens)
        self._control = {int(i): tokens[i] for i in np.flatnonzero(types == CONTROL)}
        self.control_ids = frozenset(self._control)
        self._user_defined = {int(i): tokens[i] for i in np.flatnonzero(types == USER_DEFINED)}
        try:
            model = BPE(vocab=vocabulary, merges=merges, ignore_merges=PRE_TOKENIZERS[pre] is _llama3)
        except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
            raise GGUFFormatError(f"{file.path}: metadata key 'tokenizer.ggml.merges': {error}") from None
        # Two front ends that share one model in memory: one sees special tokens in a text, the other does not.
        self._plain = _backend(model, pre)
        self._parsing = _backend(model, pre)
        self._parsing.add_special_tokens([AddedToken(t, normalized=False) for t in self._control.values()])
        self._parsing.add_tokens([AddedToken(t, normalized=False) for t in self._user_defined.values()])

        def token_id(name: str) -> int | None:
            return file.get(f"tokenizer.ggml.{name}_token_id", int, None, minimum=0, maximum=len(tokens) - 1)

        self.bos_id = token_id("bos")
        eos_id = token_id("eos")
        self.bos_token = "" if self.bos_id is None else tokens[self.bos_id]
        self.eos_token = "" if eos_id is None else tokens[eos_id]
        special = self._control | self._user_defined
        ends = {eos_id, token_id("eot"), token_id("eom"), *(i for i, text in special.items() if text in END_TOKENS)}
        self.eos_ids = frozenset(i for i in ends if i is not None)
        self._add_bos = file.get("tokenizer.ggml.add_bos_token", bool, PRE_TOKENIZERS[pre] is _llama3)
        self.chat_template = file.get("tokenizer.chat_template", str, None)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """Build the tokenizer of an open file.

        Raises:
            UnsupportedModelError: the file's kind of tokenizer or its pre-tokenizer is not implemented.
            GGUFFormatError: the vocabulary is missing or inconsistent.
        """
        model = file.get("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise UnsupportedModelError(f"tokenizer model {model!r} is not supported; known is gpt2 (byte-level BPE)")
        return cls(file)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text. Bytes that the vocabulary has no token for are dropped, as in the models' own tokenizers.
            add_special_tokens: put the beginning-of-text token in front, if the model wants one.
            parse_special: the spelling of a special token (``<|im_end|>``) becomes that token; otherwise it is plain
                text, which is right for text from outside.

        Raises:
            RequestError: ``text`` is no str or holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text, got a lone surrogate at position {error.start}") from None
        ids = (self._parsing if parse_special else self._plain).encode(text, add_special_tokens=False).ids
        if add_special_tokens and self._add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token stands for, perhaps a part of a character; b"" for a skipped special token."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id: expected 0 to {self.vocab_size - 1}, got {token_id}")
        if (text := self._control.get(token_id)) is not None:
            return b"" if skip_special_tokens else text.encode()
        if (text := self._user_defined.get(token_id)) is not None:
            return text.encode()
        token = self._plain.id_to_token(token_id) or ""
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # not spelled in bytes: some files hold a few tokens as they are
            return token.encode()


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


def _backend(model: BPE, pre: str) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    if PRE_TOKENIZERS[pre] is _qwen2:
        backend.normalizer = normalizers.NFC()
    return backend
