"""Tokenizers of files that make the library end the process, panic, or take time and memory without bound."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_tokenizer_file import write_tokenizer
from support.hf_tokenizers import SPECIAL, byte_level, save, unigram, write

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.tokenizers import library, tokenizer_json
from fastinfer.tokenizers.pre_tokenizers import LINEAR_FORMS
from fastinfer.tokenizers.tokenizer import Tokenizer

Change = Callable[[dict[str, Any]], object]


def split(pattern: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def replace(pattern: Any, content: str = "x") -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers" if kind == "normalizer" else "pretokenizers": steps}


def section(kind: str, value: Any) -> Change:
    return lambda values: values.update({kind: value})


def model(**fields: Any) -> Change:
    """A model with the special tokens alone."""
    return lambda values: values.update(model=fields, added_tokens=values["added_tokens"][: len(SPECIAL)])


WORDS = {name: i for i, name in enumerate(SPECIAL)}


def charsmap(texts: bytes, size: int = 8) -> dict[str, Any]:
    data = size.to_bytes(4, "little") + bytes(8) + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


DOUBLING = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
UNSUPPORTED: list[tuple[Change, str]] = [
    (lambda v: v["model"].update(continuing_subword_prefix="####"), "model.continuing_subword_prefix"),
    (section("pre_tokenizer", split({"Regex": "(a+)+$"})), "pre_tokenizer.pattern: a search may take too long"),
    (section("normalizer", replace({"Regex": "(a|a)*b"})), "normalizer.pattern: a search may take too long"),
    (
        section("pre_tokenizer", sequence("pre_tokenizer", [DOUBLING, split({"Regex": r"\s+$"})])),
        "pre_tokenizer.pretokenizers[1].pattern: a search may take too long",
    ),
    (section("decoder", replace({"Regex": "(a+)+$"})), "decoder.pattern: a search may take too long"),
    (section("normalizer", replace({"String": "a"}, "a" * 101)), "normalizer: a text may grow more than 100-fold"),
    (section("normalizer", replace({"Regex": "[ab]"}, "a" * 101)), "more than 100-fold"),
    (section("normalizer", {"type": "Prepend", "prepend": "a" * 101}), "more than 100-fold"),
    (section("normalizer", charsmap(b"abc\0" + b"a" * 101)), "more than 100-fold"),
    (section("normalizer", sequence("normalizer", [replace({"String": "a"}, "aa")] * 7)), "more than 100-fold"),
    (section("pre_tokenizer", sequence("pre_tokenizer", [DOUBLING] * 7)), "more than 100-fold"),
    (section("normalizer", sequence("normalizer", [{"type": "NFC"}] * 2000)), "at most 1000 objects"),
]
MALFORMED: list[tuple[Change, str]] = [
    (section("pre_tokenizer", split({"Regex": ""})), "pre_tokenizer.pattern: expected at least one character"),
    (section("normalizer", replace({"String": ""})), "normalizer.pattern: expected at least one character"),
    (section("normalizer", charsmap(b"a\0", size=2**32 - 4)), "precompiled_charsmap: expected a trie inside 14 bytes"),
    (section("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}), "charsmap: expected base64"),
    (section("normalizer", {"type": "Precompiled", "precompiled_charsmap": 7}), "charsmap: expected base64"),
    (section("pre_tokenizer", {"type": "FixedLength", "length": 0}), "not a valid tokenizer.json"),
    (lambda v: v["post_processor"].update(special_tokens={}), "post_processor.single: the special token '<s>'"),
    (lambda v: v["post_processor"].update(pair=True), "post_processor.pair: expected a list, got True"),
    (lambda v: v["post_processor"]["single"][0]["SpecialToken"].update(id=[]), "single: the special token []"),
    (lambda v: v["post_processor"]["special_tokens"]["<s>"].update(ids=[9**9]), "token ids below 401, got 387420489"),
    (model(type="WordLevel", vocab=WORDS, unk_token="<gone>"), "model: expected an unknown token in the vocabulary"),
    (
        model(type="Unigram", vocab=[[name, 0.0] for name in SPECIAL], unk_id=None),
        "model: expected an unknown token in the vocabulary",
    ),
    (lambda v: v["model"].update(unk_token="<gone>"), "model: expected an unknown token in the vocabulary"),
    (lambda v: v["model"]["merges"].append(["a", "</s>"]), "not a valid tokenizer.json"),
]
CASES = [(UnsupportedModelError, *case) for case in UNSUPPORTED] + [(CheckpointFormatError, *c) for c in MALFORMED]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "model", byte_level())


def change(folder: Path, changed: Change) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    changed(values)
    write(folder, "tokenizer.json", values)


@pytest.mark.parametrize(("error", "changed", "part"), CASES, ids=range(len(CASES)))
def test_refused_at_load(saved: Path, error: type[FastinferError], changed: Change, part: str) -> None:
    Tokenizer.from_folder(saved)
    change(saved, changed)
    with pytest.raises(error) as caught:
        Tokenizer.from_folder(saved)
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"{saved / 'tokenizer.json'}: ")


@pytest.mark.parametrize("published", LINEAR_FORMS)
def test_expressions_of_published_vocabularies_are_replaced(published: str, saved: Path) -> None:
    steps = [split({"Regex": published}), DOUBLING]
    change(saved, section("pre_tokenizer", sequence("pre_tokenizer", steps)))
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.decode(tokenizer.encode("a  ab 1ab\n")) == "a  ab 1ab\n"


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "pre_tokenizer"])
def test_keys_that_are_spelled_with_escapes(saved: Path, key: str) -> None:
    def hostile(values: dict[str, Any]) -> None:
        values["model"]["continuing_subword_prefix"] = "##" if key == "continuing_subword_prefix" else None
        values["pre_tokenizer"] = split({"Regex": "(a+)+$"}) if key == "pre_tokenizer" else None

    change(saved, hostile)
    text = (saved / "tokenizer.json").read_text()
    assert text.count(f'"{key}"') == 1
    for escape in ("\\u00{:02x}", "\\u00{:02X}"):
        for letter in "tn_":
            spelled = key.replace(letter, escape.format(ord(letter)), 1)
            write(saved, "tokenizer.json", text.replace(f'"{key}"', f'"{spelled}"'))
            with pytest.raises(UnsupportedModelError):
                Tokenizer.from_folder(saved)


def test_a_later_key_does_not_hide_an_earlier_one(saved: Path) -> None:
    text = (saved / "tokenizer.json").read_text()
    hidden = text.replace('"fuse_unk"', '"continuing_subword_prefix": "##", "fuse_unk"', 1)
    write(saved, "tokenizer.json", hidden.replace('"fuse_unk"', '"continuing_subword_prefix": null, "fuse_unk"', 1))
    with pytest.raises(UnsupportedModelError, match="continuing_subword_prefix"):
        Tokenizer.from_folder(saved)


def test_tokens_that_look_like_keys_do_no_harm(saved: Path) -> None:
    expected = Tokenizer.from_folder(saved).encode("the fox")
    names = ['"normalizer": {', "continuing_subword_prefix", "normalizer", '"continuing_subword_prefix": "a"']

    def add(values: dict[str, Any]) -> None:
        values["model"]["vocab"] |= {name: 500 + i for i, name in enumerate(names)}

    change(saved, add)
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.encode("the fox") == expected
    assert tokenizer.vocab_size == 504


def test_steps_that_real_files_have(saved: Path) -> None:
    replacements = b"\0".join([b"a", "ﷺ".encode() * 11, b"b"]) + b"\0"
    steps = [{"type": "NFKC"}, replace({"Regex": " {2,}"}, "▁"), {"type": "Prepend", "prepend": "▁"}]
    section_json = json.dumps({"normalizer": sequence("normalizer", [charsmap(replacements), *steps])})
    tokenizer_json.checked_tokenizer_json(section_json, saved)


def test_a_panic_while_encoding_ends_the_request_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that the checks would refuse stands for whatever else may make the library panic."""
    monkeypatch.setattr(tokenizer_json, "check_pattern", lambda pattern: None)
    change(saved, section("pre_tokenizer", sequence("pre_tokenizer", [split({"Regex": "(a+)+$"}), DOUBLING])))
    tokenizer = Tokenizer.from_folder(saved)
    expected = tokenizer.encode("the fox")
    with pytest.raises(RequestError, match=r"prompt: the model's tokenizer failed on it: .*retry-limit-in-match"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("the fox") == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, RequestError])
def test_other_errors_pass_the_border(error: type[BaseException]) -> None:
    with pytest.raises(error, match=r"^$"), library.as_our_error(GGUFFormatError):
        raise error


def test_a_lone_surrogate_in_the_name_of_a_special_token(saved: Path) -> None:
    for name in ("bos_token", "eos_token"):
        for value in ("\ud800", {"content": "a\udfff"}):
            write(saved, "tokenizer_config.json", {name: value})
            with pytest.raises(CheckpointFormatError, match=f"{name}: expected text, got .* with a lone surrogate"):
                Tokenizer.from_folder(saved)


def test_unigram_with_its_unknown_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", unigram()))
    assert tokenizer.encode("\U0010ffff", add_special_tokens=False)[-1] == 0


def test_merges_whose_join_is_no_token(tmp_path: Path) -> None:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "c", "ab"],
        "token_type": np.ones(4, np.int32).tolist(),
        "merges": ["a b", "ab c"],
    }
    with pytest.raises(
        GGUFFormatError, match=r"'tokenizer.ggml.merges': expected joins that are tokens, got .*'ab', 'c'"
    ):
        Tokenizer.from_gguf(write_tokenizer(tmp_path / "model.gguf", values))
