"""Gemma 4's tokenizer in a GGUF file against the same one in the form of Hugging Face's library."""

from pathlib import Path

import pytest
from support.gguf_tokenizer_file import write_tokenizer
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from fastinfer.errors import GGUFFormatError
from fastinfer.tokenizers.tokenizer import Tokenizer

MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
PIECES = [*"abcdeno", MARK, "\n", "\n\n", "ab", f"{MARK}ab", f"{MARK}{MARK}", "on", "one", f"{MARK}one", "e\n"]
MERGES = [("a", "b"), (MARK, "ab"), (MARK, MARK), ("o", "n"), ("on", "e"), (MARK, "one"), ("\n", "\n"), ("e", "\n")]
TOKENS = [*CONTROL, *BYTES, *PIECES, "<tool>"]
TYPES = [3] * 3 + [2] + [6] * 256 + [1] * len(PIECES) + [4]
TEXTS = ["", "ab", " ab  ab", "one\n\none", "one\n one\n\n\n", "caf\u00e9 \U0001f600", "a<tool>b <bos>", "\n", "  \n  "]


def values(**changes: object) -> dict[str, object]:
    base = {
        "model": "gemma4",
        "pre": "gemma4",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": [" ".join(merge) for merge in MERGES],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": True,
    }
    return base | changes


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(write_tokenizer(tmp_path / "tokenizer.gguf", values(), "gemma4"))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text(text: str, tokenizer: Tokenizer) -> None:
    ids = {token: index for index, token in enumerate(TOKENS)}
    peer = Backend(BPE(vocab=ids, merges=MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    peer.normalizer = normalizers.Replace(" ", MARK)
    peer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    peer.add_tokens(["<tool>"])
    got = tokenizer.encode(text, parse_special=False)
    assert got == [2, *peer.encode(text).ids]
    assert tokenizer.decode(got) == text


def test_texts_begin_with_bos_even_if_the_file_says_no(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.gguf", values(add_bos_token=False), "gemma4")
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.encode("ab", parse_special=False)[0] == tokenizer.bos_id == 2


def test_control_tokens_are_found_on_request(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab<eos>", parse_special=True)[-1] == 1
    assert 1 not in tokenizer.encode("ab<eos>", parse_special=False)


def test_a_merge_into_no_token(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.gguf", values(merges=["a c"]), "gemma4")
    with pytest.raises(GGUFFormatError, match="expected joins that are tokens"):
        Tokenizer.from_gguf(file)
