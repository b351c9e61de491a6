"""Which regular expressions are accepted, and that a search takes as long as the rules say."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from fastinfer.tokenizers.linear_patterns import PatternError, check_pattern
from fastinfer.tokenizers.pre_tokenizers import LINEAR_FORMS, PRE_TOKENIZERS

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PREFIX = r"[^\r\n\p{L}\p{N}]?"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# Written in the ways that vocabularies in use have.
LINEAR = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"{CONTRACTIONS}|{PREFIX}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    rf"{PREFIX}{UPPER}*{LOWER}+{CONTRACTIONS}?|{PREFIX}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{SPACES}",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    r"[\p{Han}]+|[\p{L}&&[^\p{Han}]]+|\s+",
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    "[一-龥ࠀ-一가-퟿]+",
    " {2,}",
    r"\p{N}",
    "(?=b)",
    r"\d|\x{20}[[:alpha:]]+|\u3042",
    "(ab|cd)?e",
    "(ab){0,60}c",
    r"\p{L}(?:[\p{L}\p{M}]| (?=\p{L}))*|\s+",
    r"(?<![^\S\r\n])\s*[\r\n]+|\s{1,8}",
]
NOT_LINEAR = [
    ("(a+)+$", "loop of 'a' is in a group"),
    ("(a|a)*b", "what follows the loop of the group '(a|a)'"),
    ("(a?){30}b", "'(a?)' is repeated"),
    ("(?:(?:a{1,99}){1,99}){1,99}", "is repeated"),
    ("(ab){0,300}", "too many ways"),
    ("(?:a|bc)*", "is repeated"),
    ("(?:a|b?)*", "is repeated"),
    ("(?:a|(?=b))*", "is repeated"),
    ("(?:a|b)*c|(?:a|b)+", "loop of the group '(?:a|b)' is not optional"),
    (r"(?<!\s)\s*[\r\n]+|\s", "no alternative takes its run"),
    ("a?" * 30 + "a" * 30, "too many ways"),
    ("(" + "|".join(["a"] * 300) + ")", "too many ways"),
    ("a*b", "what follows the loop of 'a' is not optional"),
    (r"\s+$", "what follows the loop of"),
    (r"\s+(?!\S)", "no alternative takes its run"),
    (r"\s+|\s+(?!\S)", "no alternative takes its run"),
    (r"\s+(?!\S)|x\s+", "no alternative takes its run"),
    (r"\s+(?!\S)|\s{2,}", "no alternative takes its run"),
    (r"a*a*a*b|a+", "loops of 'a' is not optional"),
    (r"a*b+c|a+", "loops of 'a' is not optional"),
    (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", "is repeated"),
    (r"(?=a*b)a", "is in a group"),
    (r"(a)\1", "escape"),
    (r"(?<n>a)\g<n>", "not supported"),
    (r"(?>a*)b", "not supported"),
    (r"(?~a)", "not supported"),
    (r"(?x) a", "not supported"),
    ("(*FAIL)", "not supported"),
    (r"\X", "escape"),
    ("a+?", "quantifier '+?'"),
    ("a{1,3}+b", "quantifier '{1,3}+'"),
    ("a**", "repeats nothing"),
    ("(", "not closed"),
    (")", "not expected"),
    ("[a", "not closed"),
    ("[]a]", "empty class"),
    ("a{,}", "not a quantifier"),
    ("(" * 2000 + ")" * 2000, "not supported"),
    ("[" * 2000, "nested"),
]


@pytest.mark.parametrize("pattern", LINEAR)
def test_accepted(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(("pattern", "part"), NOT_LINEAR, ids=range(len(NOT_LINEAR)))
def test_refused(pattern: str, part: str) -> None:
    with pytest.raises(PatternError, match=re.escape(part)) as caught:
        check_pattern(pattern)
    assert len(str(caught.value)) < 200


def patterns(state: Any) -> Iterator[str]:
    """All regular expressions in a part of tokenizer.json."""
    if isinstance(state, dict):
        yield from (value for key, value in state.items() if key == "Regex")
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from patterns(value)


def test_linear_forms_split_like_the_published_expressions() -> None:
    random.seed(0)
    parts = [
        "a",
        "B",
        " ",
        "  ",
        "\n",
        "\r\n",
        "1",
        "23",
        "456",
        "\u0308",
        "é",
        "?",
        "/",
        "'ll",
        "\t",
        "中",
        " " * 5,
        "7" * 9,
    ]
    texts = ["".join(random.choices(parts, k=random.randint(1, 14))) for _ in range(3000)]
    texts += [" " * random.randint(1, 1300) + random.choice(["", "x", "\n", "?"]) for _ in range(50)]
    texts += ["1" * number for number in range(150, 184)]
    for published, linear in LINEAR_FORMS.items():
        with pytest.raises(PatternError):
            check_pattern(published)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (published, linear)]
        for text in texts:
            words = [split.pre_tokenize_str(text) for split in splits]
            assert words[0] == words[1], text


def test_our_own_patterns_are_linear() -> None:
    found = {p for make in PRE_TOKENIZERS.values() for p in patterns(json.loads(make().__getstate__()))}
    assert len(found) > 15
    for pattern in found:
        check_pattern(pattern)
