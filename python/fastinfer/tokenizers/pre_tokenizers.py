"""Pre-tokenizers: how byte-level tokenizers split text into words before the merges.

GGUF files name theirs in ``tokenizer.ggml.pre``. The patterns are those of the models' original tokenizers, because the
same merges on other words would give other ids.
"""

from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


def _byte_level(use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level()


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Split off every digit, then split like GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    """Split digits into runs of up to three."""
    return _split(_WORD + r"|\p{N}{1,3}|" + _REST)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_WORD + r"|\p{N}|" + _REST)


def _tekken() -> pre_tokenizers.PreTokenizer:
    """Split like Mistral Nemo: a word ends before a capital letter, and slashes belong to preceding punctuation."""
    return _split(_CASED_WORD + r"|\p{N}|" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1))


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "tekken": _tekken,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}

# Their BPE encodes a word that is a token without merges (``ignore_merges`` of the tokenizers library), and by default
# they begin a text with the beginning-of-text token.
IGNORE_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
# They normalise a text to NFC first.
NORMALIZE_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
