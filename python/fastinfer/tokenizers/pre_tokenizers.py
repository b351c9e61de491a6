"""Pre-tokenizers: how byte-level tokenizers split text into words before the merges.

GGUF files name theirs in ``tokenizer.ggml.pre``. The patterns are those of the models' original tokenizers, because the
same merges on other words would give other ids.
"""

from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# A word ends before a capital letter.
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
# Slashes belong to preceding punctuation.
_REST_WITH_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_GPT4O = "|".join(
    [*(word + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _CASED_WORDS), r"\p{N}{1,3}", _REST_WITH_SLASHES]
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN35 = (_WORD.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+") + r"|\p{N}|" + _REST).replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)


_POWERS = "|".join([*(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)|\s{1}"])
# ASCII punctuation may begin an ASCII word.
_DEEPSEEK = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Han characters and the two Japanese syllabaries.
_EAST_ASIAN = r"[\u4E00-\u9FA5\u3040-\u30FF]+"
# Letters with a case, except those of alphabets that the pattern of DeepSeek's first models does not list.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C88\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB68"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_HAN_AND_HANGUL = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_EXAONE_REST = r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
_JAIS_WORDS = _WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"

# Numbers are divided into threes from the right; those of more than 183 digits, which would take long, from the left.
_DIGITS, _NUMBERS = r"\d{1,3}(?=(?:\d{3}){0,60}\b)", r"\p{N}{1,3}(?=(?:\p{N}{3}){0,60}(?!\p{N}))"
# Words with single spaces between them are one.
_EXAONE_MOE = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}(?:[\p{{L}}\p{{M}}]| (?=\p{{L}}))*{_EXAONE_REST}"
# Runs of spaces are divided into powers of two.
_JAIS2 = _JAIS_WORDS + r"(?<![^\S\r\n])\s*[\r\n]+|" + _POWERS
# Expressions of published vocabularies that may take more than linear time, with those in their place.
LINEAR_FORMS = {
    r"\d{1,3}(?=(?:\d{3})*\b)": _DIGITS,
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))": _NUMBERS,
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+" + _EXAONE_REST: _EXAONE_MOE,
    _JAIS_WORDS + r"\s*[\r\n]+|" + _POWERS: _JAIS2,
}
_ASIAN = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0EFF\u1780-\u17FF"
    r"\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)


def _byte_level(use_regex: bool = True) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split off the matches of each pattern, from what the ones before it have left apart."""
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, _byte_level(use_regex=False)])


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


def _laguna() -> pre_tokenizers.PreTokenizer:
    """Split off line ends, then split like Qwen2."""
    return _split(r"[^\n]+|\n+", _WORD + r"|\p{N}|" + _REST)


def _minicpm5() -> pre_tokenizers.PreTokenizer:
    """Split off digits in runs of up to three, then split like Qwen2: spaces before digits are not divided."""
    return _split(r"\p{N}{1,3}", _WORD + r"|\p{N}+|" + _REST)


def _qwen35() -> pre_tokenizers.PreTokenizer:
    """Split like Qwen2, with combining marks as letters."""
    return _split(_QWEN35)


def _seed_coder() -> pre_tokenizers.PreTokenizer:
    """Split like Qwen2, with line ends apart from punctuation."""
    rest = r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    return _split(_WORD + r"|\p{N}|" + rest)


def _bailing() -> pre_tokenizers.PreTokenizer:
    """Split like Qwen2, with every line end by itself."""
    return _split(_WORD + r"|\p{N}|" + _REST.replace(r"\s*[\r\n]+", r"\s*[\r\n]", 1))


def _deepseek_llm() -> pre_tokenizers.PreTokenizer:
    punctuation = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+"
    return _split(r"[\r\n]", rf"\s?{_CASED}+", punctuation, r"(?<!\s)\s+$", _HAN_AND_HANGUL, r"\p{N}")


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    return _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")


def _deepseek_v3() -> pre_tokenizers.PreTokenizer:
    """Split off digits in runs of up to three, then East Asian text."""
    return _split(r"\p{N}{1,3}", _EAST_ASIAN, _DEEPSEEK)


def _kimi_k2() -> pre_tokenizers.PreTokenizer:
    """Split like GPT-4o, with runs of Han characters apart and line ends alone after punctuation."""
    words = "|".join([*(word + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _CASED_WORDS), r"\p{N}{1,3}", _REST])
    for letters in (_UPPER, _LOWER):
        words = words.replace(letters, letters[:-1] + r"&&[^\p{Han}]]")
    return _split(r"\p{Han}+|" + words)


def _falcon() -> pre_tokenizers.PreTokenizer:
    """Split off punctuation, split like GPT-2, then divide digits into runs of three from the left."""
    split = pre_tokenizers.Split(Regex(r"[\p{P}$+<=>^~|`]+"), "isolated")
    digits = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.Split(Regex(_GPT2), "isolated"), digits, _byte_level(False)])


def _tekken() -> pre_tokenizers.PreTokenizer:
    """Split like Mistral Nemo."""
    return _split("|".join([*_CASED_WORDS, r"\p{N}", _REST_WITH_SLASHES]))


def _gpt4o() -> pre_tokenizers.PreTokenizer:
    """Split like GPT-4o: words as Mistral Nemo's, with contractions, and digits in runs of up to three."""
    return _split(_GPT4O)


def _tiny_aya() -> pre_tokenizers.PreTokenizer:
    """Divide numbers into threes from the right, then split like GPT-4o."""
    return _split(_DIGITS, _GPT4O)


def _afmoe() -> pre_tokenizers.PreTokenizer:
    """Divide numbers into threes from the right, split off texts of Asian scripts, then split like DeepSeek-V3."""
    return _split(_NUMBERS, _ASIAN, _DEEPSEEK)


def _exaone_moe() -> pre_tokenizers.PreTokenizer:
    return _split(_EXAONE_MOE)


def _jais2() -> pre_tokenizers.PreTokenizer:
    return _split(_JAIS2)


def _youtu() -> pre_tokenizers.PreTokenizer:
    """Split off Hangul, East Asian punctuation, Bopomofo and other East Asian text, then like GPT-4o, digits alone."""
    punctuation = r"[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
    scripts = rf"[\uAC00-\uD7A3\u3131-\u318E]+|{punctuation}|[\u3105-\u312F]+|{_EAST_ASIAN}"
    return _split(scripts, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"))


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "exaone4": _gpt2,
    **dict.fromkeys(("phi-2", "olmo", "mpt", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"), _gpt2),
    **dict.fromkeys(("smollm", "command-r", "exaone", "refact", "starcoder"), _smollm),
    **dict.fromkeys(("minerva-7b", "codeshell", "mellum2"), _smollm),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "pixtral"), _llama3),
    **dict.fromkeys(("falcon-h1", "midm-2.0"), _llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _llama3),
    "tekken": _tekken,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _gpt4o),
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    **dict.fromkeys(("stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"), _qwen2),
    "laguna": _laguna,
    "minicpm5": _minicpm5,
    "qwen35": _qwen35,
    "seed-coder": _seed_coder,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "deepseek-llm": _deepseek_llm,
    "deepseek-coder": _deepseek_coder,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _deepseek_v3),
    "kimi-k2": _kimi_k2,
    "falcon": _falcon,
    "youtu": _youtu,
    "tiny_aya": _tiny_aya,
    "cohere2moe": _tiny_aya,
    "afmoe": _afmoe,
    "exaone-moe": _exaone_moe,
    "jais-2": _jais2,
}

# Their BPE encodes a word that is a token without merges (``ignore_merges`` of the tokenizers library).
IGNORE_MERGES = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "pixtral", "tekken", "glm4", "glm5"}
    | {"youtu", "minicpm5"}
)
# By default they do not begin a text with the beginning-of-text token, as the others of IGNORE_MERGES do.
NO_BOS = frozenset({"glm4", "glm5", "youtu", "minicpm5"})
# They normalise a text to NFC first.
NORMALIZE_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "command-r", "qwen35", "stablelm2", "megrez", "kormo"})
