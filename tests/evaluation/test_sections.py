"""Sections of a text: each begins as the model expects a text to, and no more of the text is tokenised than is used."""

from pathlib import Path

import pytest
from support.hf_tokenizers import TEXT, byte_fallback, byte_level, gemma_like, save, unigram
from support.tiny_folder import write_byte_tokenizer
from tokenizers import processors

from fastinfer.errors import RequestError
from fastinfer.evaluation import text_file
from fastinfer.evaluation.text_file import Sections, read_sections
from fastinfer.tokenizers.tokenizer import Tokenizer


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 8), encoding="utf-8")
    return str(tmp_path / "text.txt")


def text_ids(file: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(Path(file).read_text(), add_special_tokens=False, parse_special=False)


def test_each_section_begins_with_the_token_before_a_text(file: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", byte_level()))
    sections, ids = read_sections(file, tokenizer, 32), text_ids(file, tokenizer)
    assert sections.given == 1
    assert len(sections.ids) == len(ids) // 31
    for index, section in enumerate(sections.ids):
        assert section == [tokenizer.bos_id, *ids[31 * index : 31 * (index + 1)]]


def test_several_tokens_before_a_text_are_given(file: str, tmp_path: Path) -> None:
    backend = byte_level()
    save(tmp_path / "model", backend)
    special = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> </s> $A </s>", special_tokens=special)
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path / "model")
    ids = text_ids(file, tokenizer)
    before = [number for _, number in special]
    assert read_sections(file, tokenizer, 20, 45) == Sections([[*before, *ids[:18]], [*before, *ids[18:36]]], 2)
    with pytest.raises(RequestError, match="more tokens than the 2 before a text, got 2"):
        read_sections(file, tokenizer, 2)


def test_without_such_tokens_sections_are_pieces_of_the_text(file: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = text_ids(file, tokenizer)
    found = read_sections(file, tokenizer, 50, 249)
    assert found == Sections([ids[start : start + 50] for start in range(0, 200, 50)], 1)
    assert found.num_tokens == 200


def test_a_text_shorter_than_a_section(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text("four")
    with pytest.raises(RequestError, match=r"text\.txt: the text must have at least 32 tokens, got 4"):
        read_sections(str(tmp_path / "text.txt"), Tokenizer.from_folder(tmp_path), 32)
    with pytest.raises(RequestError, match="max_tokens must be at least 4, those of one section, got 3"):
        read_sections(str(tmp_path / "text.txt"), Tokenizer.from_folder(tmp_path), 4, 3)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, gemma_like, unigram])
@pytest.mark.parametrize("max_tokens", [64, 320, 1000])
def test_the_beginning_of_a_text_is_tokenised_as_in_the_whole(
    tmp_path: Path, make: object, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", make()))  # type: ignore[operator]
    lines = [text + " " * (number % 7) for number, text in enumerate(TEXT * 100)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines), encoding="utf-8")
    file = str(tmp_path / "text.txt")
    expected = read_sections(file, tokenizer, 32).ids[: max_tokens // 32]
    lengths: list[int] = []
    encode = tokenizer.encode

    def watched(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", watched)
    assert read_sections(file, tokenizer, 32, max_tokens).ids == expected
    assert sum(lengths) < len((tmp_path / "text.txt").read_text()) * 0.9


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
def test_no_token_depends_on_where_the_text_is_cut(
    tmp_path: Path, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some cuts are within an indentation, whose tokens then are others."""
    monkeypatch.setattr(text_file, "CHARS_PER_TOKEN", 1)
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", make()))  # type: ignore[operator]
    (tmp_path / "text.txt").write_text("def f(x):\n    return x**2\n" * 120)
    file = str(tmp_path / "text.txt")
    [whole] = read_sections(file, tokenizer, 401, 401).ids
    for length in range(4, 400, 3):
        assert read_sections(file, tokenizer, length, length).ids == [whole[:length]]
