"""SentencePiece vocabularies of GGUF files: the order of joins, bytes, special tokens, and Gemma's real vocabulary."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.gguf_tokenizer_file import write_tokenizer

from fastinfer import hub
from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers.sentencepiece import SentencePieceBPE
from fastinfer.tokenizers.tokenizer import Detokenizer, Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def joined(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: of all joins that are tokens take the best, the leftmost of equals, until there is none."""
    pieces = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            return pieces
        _, place = min(joins)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.mark.parametrize("seed", range(30))
def test_joins_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "ab▁" if seed % 2 else "abcé▁"
    tokens = set(alphabet) - {"b"}  # a character that is no token itself, but part of some
    while len(tokens) < 25:
        tokens.add(rng.choice([*tokens, "b"]) + rng.choice([*tokens, "b"]))
    # Few different scores, so that many joins are equals.
    scores = {token: -float(rng.randrange(8)) for token in sorted(tokens)}
    pieces = {token: i for i, token in enumerate(scores)}
    names = [*scores, *BYTES]
    encode = SentencePieceBPE(pieces, list(scores.values()), range(len(scores), len(names)), None, {}, {})
    for _ in range(60):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        expected = [p if p in scores else "".join(f"<0x{b:02X}>" for b in p.encode()) for p in joined(text, scores)]
        assert "".join(names[i] for i in encode(text.replace("▁", " "), False)) == "".join(expected)
        assert len(encode(text, False)) >= len(joined(text, scores))
        split = [names[i] for i in encode(text, False) if not names[i].startswith("<0x")]
        assert split == [p for p in joined(text, scores) if p in scores]


def toy(tmp_path: Path, architecture: str = "llama", with_bytes: bool = True, **changes: Any) -> Tokenizer:
    """Words of "ab", some special tokens, and bytes."""
    kinds: dict[str, tuple[float, int]] = {
        "<unk>": (0.0, UNKNOWN),
        "<s>": (0.0, CONTROL),
        "</s>": (0.0, CONTROL),
        "<|user|>": (0.0, CONTROL),
        "▁▁": (-1000.0, USER_DEFINED),
        "\n": (-1000.0, USER_DEFINED),
        "<|im_end|>": (-1000.0, USER_DEFINED),
        **{
            token: (-float(i), NORMAL)
            for i, token in enumerate(["▁a", "ab", "▁ab", "▁", "a", "b", "<", ">", "s", "<s"])
        },
        **(dict.fromkeys(BYTES, (0.0, BYTE)) if with_bytes else {}),
    }
    values = {
        "model": "llama",
        "tokens": list(kinds),
        "scores": [score for score, _ in kinds.values()],
        "token_type": [kind for _, kind in kinds.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return Tokenizer.from_gguf(write_tokenizer(tmp_path / "toy.gguf", values | changes, architecture))


def spellings(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer._vocabulary.tokens[i] or "" for i in tokenizer.encode(text, **options)]


def test_a_text_begins_with_bos_and_a_space(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path)
    assert spellings(tokenizer, "ab a") == ["<s>", "▁ab", "▁a"]
    assert spellings(tokenizer, "ab", add_special_tokens=False) == ["▁ab"]
    assert spellings(tokenizer, "") == ["<s>"]
    assert spellings(toy(tmp_path, add_space_prefix=False, add_bos_token=False), "ab a") == ["ab", "▁a"]


def test_the_added_space_is_taken_away_from_a_whole_text_only(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path)
    ids = tokenizer.encode("ab a")
    assert tokenizer.decode(ids, continues=False) == "ab a"
    assert tokenizer.decode(ids) == " ab a"  # as it goes on after a prompt
    assert tokenizer.decode(ids, skip_special_tokens=False, continues=False) == "<s> ab a"
    assert tokenizer.decode(tokenizer.encode(" a"), continues=False) == " a"
    without = toy(tmp_path, add_space_prefix=False)
    assert without.decode(without.encode(" a"), continues=False) == " a"


def test_a_text_that_continues_another_gets_no_space(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path)
    assert spellings(tokenizer, "ab a", add_special_tokens=False, continues=True) == ["ab", "▁a"]
    assert spellings(tokenizer, " ab", add_special_tokens=False, continues=True) == ["▁ab"]
    assert spellings(tokenizer, "", add_special_tokens=False, continues=True) == []


def test_unknown_characters_become_bytes(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert spellings(tokenizer, "aé\0") == ["a", "<0xC3>", "<0xA9>", "<0x00>"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(i) for i in tokenizer.encode("é")] == ["", "é"]


def test_without_bytes_a_run_of_unknown_characters_is_one_token(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path, with_bytes=False, add_bos_token=False, add_space_prefix=False)
    assert spellings(tokenizer, "aéé é ab") == ["a", "<unk>", "▁", "<unk>", "▁ab"]
    assert tokenizer.decode(tokenizer.encode("aéb")) == "ab"
    dropping = toy(tmp_path, with_bytes=False, unknown_token_id=None, add_bos_token=False)
    assert spellings(dropping, "aéb") == ["▁a", "b"]


def test_special_tokens_in_a_text(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path)
    text = "ab<s>a  a\n"
    assert spellings(tokenizer, text, add_special_tokens=False) == ["▁ab", "<s>", "▁a", "▁▁", "a", "\n"]
    # User-defined tokens are words that happen to be whole; control tokens cannot be spelled.
    plain = spellings(tokenizer, text, add_special_tokens=False, parse_special=False)
    assert plain == ["▁ab", "<s", ">", "a", "▁▁", "a", "\n"]
    assert tokenizer.control_ids == {0, 1, 2, 3, 6}


def test_end_of_turn_is_a_control_token_whatever_its_file_says(tmp_path: Path) -> None:
    tokenizer = toy(tmp_path)
    assert tokenizer.eos_ids == {2, 6}
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [6]
    assert 6 not in tokenizer.encode("<|im_end|>", parse_special=False)
    assert tokenizer.decode([6]) == ""


def test_phi3_strips_white_space_after_control_tokens(tmp_path: Path) -> None:
    text = "<|user|> \n a<s> a"
    kept = spellings(toy(tmp_path), text, add_special_tokens=False)
    assert kept == ["<|user|>", "▁▁", "\n", "▁a", "<s>", "▁▁", "a"]
    phi3 = spellings(toy(tmp_path, "phi3"), text, add_special_tokens=False)
    assert phi3 == ["<|user|>", "▁a", "<s>", "▁▁", "a"]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(shared_toy: Tokenizer, text: str) -> None:
    assume("▁" not in text)  # is a space to SentencePiece
    ids = shared_toy.encode(text, parse_special=False)
    assert shared_toy.decode(ids, continues=False) == text


@pytest.fixture(scope="module")
def shared_toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ({"scores": [0.0]}, "expected 273 finite token scores, got 1"),
        ({"scores": [float("nan")] * 273}, "expected 273 finite token scores"),
        ({"token_type": [BYTE] + [NORMAL] * 272}, "expected <0x00> to <0xFF> for a byte token, got '<unk>'"),
        ({"token_type": [NORMAL] * 272 + [BYTE]}, "expected tokens for none or all of the 256 bytes, got 1"),
        ({"unknown_token_id": 273}, "'tokenizer.ggml.unknown_token_id': expected 0 to 272, got 273"),
        ({"add_space_prefix": 1}, "'tokenizer.ggml.add_space_prefix': expected bool, got 1"),
    ],
)
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(GGUFFormatError) as caught:
        toy(tmp_path, **changes)
    assert part in str(caught.value)


# Ids by sentencepiece 0.2.3 from a model with Gemma's pieces, scores and types.
GEMMA = {
    "The capital of France is Paris.": [818, 5279, 529, 7001, 563, 9079, 236761],
    "   three spaces\n\n\tand tabs": [139, 19891, 9952, 108, 255968, 624, 42364],
    "日本語 and émojis 😀👍🏽": [94951, 532, 1559, 1289, 92467, 163543, 240493, 242713],
    "<table> x >  </b>": [168, 1123, 1890, 138, 209],
    "\x07𒀀": [245, 247364],
    "a" * 20: [128820, 128820, 50354],
}


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    path = next(entry.path for entry in hub.models() if entry.name == "gemma3-270m")
    if path is None:
        pytest.skip("Gemma's file is not here: fastinfer pull gemma3-270m")
    return Tokenizer.from_gguf(GGUFFile(path))


@pytest.mark.parametrize("text", GEMMA)
def test_gemma_equals_sentencepiece(gemma: Tokenizer, text: str) -> None:
    ids = gemma.encode(text)
    assert ids == [2, *GEMMA[text]]
    assert gemma.decode(ids) == text


def test_names_of_gemma(gemma: Tokenizer) -> None:
    assert gemma.vocab_size == 262_144
    assert (gemma.bos_token, gemma.eos_token, gemma.eos_ids) == ("<bos>", "<eos>", {1, 106})
    assert gemma.encode("<start_of_turn>user", add_special_tokens=False)[0] == 105
    assert 105 not in gemma.encode("<start_of_turn>user", parse_special=False)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_from_gemma(gemma: Tokenizer, text: str) -> None:
    assume("▁" not in text)
    assert gemma.decode(gemma.encode(text, parse_special=False)) == text
