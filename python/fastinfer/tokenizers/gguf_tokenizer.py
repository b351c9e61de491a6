"""Reader of the tokenizer in a GGUF file: BPE with merges, of bytes or as in Gemma 4, or SentencePiece with scores."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers import library
from fastinfer.tokenizers.pre_tokenizers import IGNORE_MERGES, NO_BOS, NORMALIZE_NFC, PRE_TOKENIZERS
from fastinfer.tokenizers.sentencepiece import SentencePieceBPE
from fastinfer.tokenizers.vocabulary import MARKER, SPACE, Vocabulary, byte_level_bytes, end_tokens, sentencepiece_bytes

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Phi-3's control tokens absorb the white space that follows them, except for these tokens.
_PHI3_KEEPS = frozenset({"<unk>", "<s>", "<|endoftext|>"})

Encode = Callable[[str, bool], list[int]]


def read_tokenizer(file: GGUFFile) -> tuple[Vocabulary, Encode]:
    """Read the vocabulary, and make the function from a text and ``parse_special`` to token ids.

    Raises:
        UnsupportedModelError: the kind of tokenizer or its pre-tokenizer is not implemented.
        GGUFFormatError: the vocabulary is missing or inconsistent.
    """
    model = file.get("tokenizer.ggml.model", str)
    if model not in READERS:
        raise UnsupportedModelError(
            f"tokenizer model {model!r} is not supported; known are gpt2 (byte-level BPE), llama (SentencePiece BPE) "
            "and gemma4"
        )
    return READERS[model](file, _Tokens(file))


class _Tokens:
    """Tokens of a file, by id, spelling and type, for both kinds of tokenizers."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.spellings = file.get("tokenizer.ggml.tokens", list)
        count = len(self.spellings)
        self.ids = {token: index for index, token in enumerate(self.spellings)}
        if len(self.ids) != count:
            raise GGUFFormatError(f"{file.path}: {count - len(self.ids)} tokens of the vocabulary occur twice")
        types = file.get("tokenizer.ggml.token_type", np.ndarray, np.full(count, NORMAL, np.int32))
        if len(types) != count:
            raise GGUFFormatError(f"{file.path}: expected {count} token types, got {len(types)}")
        self.types = types.tolist()
        added = {self.spellings[i]: int(i) for i in np.flatnonzero(types == USER_DEFINED)}
        markers = {token: i for token, i in added.items() if MARKER.fullmatch(token)}
        self.user_defined = {token: i for token, i in added.items() if token not in markers}
        self.control = {self.spellings[i]: int(i) for i in np.flatnonzero((types == CONTROL) | (types == UNKNOWN))}
        self.control |= markers

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token (``bos``, ``eos``, ``unknown``, ...); None if the file does not name it."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.file.get(key, int, None, minimum=0, maximum=len(self.spellings) - 1)

    def listed_ends(self) -> list[int]:
        """Return the ids that end an answer in files of Ollama, which have them all in one list."""
        key = "tokenizer.ggml.eos_token_ids"
        ids = self.file.get(key, np.ndarray, np.zeros(0, np.int32))
        if ids.dtype.kind not in "iu" or not ((ids >= 0) & (ids < len(self.spellings))).all():
            limits = f"integers of 0 to {len(self.spellings) - 1}"
            raise GGUFFormatError(f"{self.file.path}: metadata key {key!r}: expected {limits}, got {ids!s:.80}")
        return [int(i) for i in ids]

    def vocabulary(
        self, *, to_bytes: Callable[[str], bytes], literal: bool, add_bos: bool, adds_space: bool
    ) -> Vocabulary:
        """Build the vocabulary; ``add_bos`` is a default that the file can override."""
        bos, eos = self.special_id("bos"), self.special_id("eos")
        added = self.control | self.user_defined
        ends = {
            eos,
            self.special_id("eot"),
            self.special_id("eom"),
            *self.listed_ends(),
            *(added[name] for name in end_tokens(added.keys())),
        }
        add_bos = self.file.get("tokenizer.ggml.add_bos_token", bool, add_bos)
        add_eos = self.file.get("tokenizer.ggml.add_eos_token", bool, False)
        return Vocabulary(
            tokens=self.spellings,
            control=frozenset(self.control.values()),
            literal=frozenset(self.user_defined.values()) if literal else frozenset(),
            to_bytes=to_bytes,
            bos_id=bos,
            eos_id=eos,
            eos_ids=frozenset(i for i in ends if i is not None),
            prefix=(bos,) if add_bos and bos is not None else (),
            suffix=(eos,) if add_eos and eos is not None else (),
            adds_space=adds_space,
            chat_template=self.file.get("tokenizer.chat_template", str, None),
        )


def _byte_level(file: GGUFFile, tokens: _Tokens) -> tuple[Vocabulary, Encode]:
    merges = _merges(file, tokens)
    pre = file.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(f"pre-tokenizer {pre!r} is not supported; known are {', '.join(PRE_TOKENIZERS)}")
    ignore_merges = pre in IGNORE_MERGES
    with library.as_our_error(lambda message: GGUFFormatError(f"{file.path}: tokenizer.ggml.merges: {message}")):
        model = BPE(vocab=tokens.ids, merges=merges, ignore_merges=ignore_merges)
    normalizer = normalizers.NFC() if pre in NORMALIZE_NFC else None
    encode = _encode(tokens, model, normalizer, PRE_TOKENIZERS[pre]())
    vocabulary = tokens.vocabulary(
        to_bytes=byte_level_bytes, literal=True, add_bos=ignore_merges and pre not in NO_BOS, adds_space=False
    )
    return vocabulary, encode


def _merges(file: GGUFFile, tokens: _Tokens) -> list[tuple[str, str]]:
    merges = []
    for merge in file.get("tokenizer.ggml.merges", list):
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            got = f"expected pairs, got {merge!r:.90}"
            raise GGUFFormatError(f"{file.path}: metadata key 'tokenizer.ggml.merges': {got}")
        if first + second not in tokens.ids:
            got = f"expected joins that are tokens, got {(first, second)!r:.90}"
            raise GGUFFormatError(f"{file.path}: metadata key 'tokenizer.ggml.merges': {got}")
        merges.append((first, second))
    return merges


def _gemma4(file: GGUFFile, tokens: _Tokens) -> tuple[Vocabulary, Encode]:
    """Read BPE on characters, with a marker in place of spaces and byte tokens for characters that have none."""
    with library.as_our_error(lambda message: GGUFFormatError(f"{file.path}: tokenizer.ggml.merges: {message}")):
        unknown = tokens.special_id("unknown")
        model = BPE(
            vocab=tokens.ids,
            merges=_merges(file, tokens),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens.spellings[unknown],
        )
    # No token has a line end beside another character.
    encode = _encode(tokens, model, normalizers.Replace(" ", SPACE), pre_tokenizers.Split(Regex(r"\n+"), "isolated"))
    vocabulary = tokens.vocabulary(to_bytes=sentencepiece_bytes, literal=True, add_bos=True, adds_space=False)
    if vocabulary.bos_id is not None:
        # Early files, Google's own too, have an add_bos_token of false, but without bos the model repeats itself.
        vocabulary = replace(vocabulary, prefix=(vocabulary.bos_id,))
    return vocabulary, encode


def _encode(
    tokens: _Tokens, model: BPE, normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> Encode:
    """Make the encoder of a model: two front ends that share it, of which the second one finds control tokens."""
    plain, parsing = Backend(model), Backend(model)
    for backend in (plain, parsing):
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = pre_tokenizer
        backend.add_tokens([AddedToken(token, normalized=False) for token in tokens.user_defined])
    parsing.add_special_tokens([AddedToken(token, normalized=False) for token in tokens.control])

    def encode(text: str, parse_special: bool) -> list[int]:
        return library.encode(parsing if parse_special else plain, text)

    return encode


def _sentencepiece(file: GGUFFile, tokens: _Tokens) -> tuple[Vocabulary, Encode]:
    scores = file.get("tokenizer.ggml.scores", np.ndarray)
    if len(scores) != len(tokens.types) or not np.isfinite(scores).all():
        raise GGUFFormatError(f"{file.path}: expected {len(tokens.types)} finite token scores, got {len(scores)}")
    byte_ids = {}
    for token, token_id, kind in zip(tokens.spellings, range(len(tokens.types)), tokens.types, strict=True):
        if kind == BYTE:
            if len(byte := sentencepiece_bytes(token)) != 1:
                raise GGUFFormatError(f"{file.path}: expected <0x00> to <0xFF> for a byte token, got {token!r:.80}")
            byte_ids[byte[0]] = token_id
    if len(byte_ids) not in (0, 256):
        raise GGUFFormatError(f"{file.path}: expected tokens for none or all of the 256 bytes, got {len(byte_ids)}")
    adds_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    phi3 = file.get("general.architecture", str, "") == "phi3"
    encode = SentencePieceBPE(
        {token: i for token, i in tokens.ids.items() if tokens.types[i] == NORMAL},
        scores.tolist(),
        [byte_ids[byte] for byte in sorted(byte_ids)],
        tokens.special_id("unknown"),
        tokens.control,
        tokens.user_defined,
        adds_space,
        frozenset(i for token, i in tokens.control.items() if token not in _PHI3_KEEPS) if phi3 else frozenset(),
    )
    vocabulary = tokens.vocabulary(to_bytes=sentencepiece_bytes, literal=False, add_bos=True, adds_space=adds_space)
    return vocabulary, encode


# Readers by ``tokenizer.ggml.model``.
READERS: dict[str, Callable[[GGUFFile, _Tokens], tuple[Vocabulary, Encode]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}
