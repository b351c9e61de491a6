"""Tokenizers of Hugging Face folders, trained here, against transformers on the same folder."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.hf_tokenizers import SPECIAL, TEXT, byte_fallback, byte_level, gemma_like, save, unigram, write
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from tokenizers.models import Unigram

from fastinfer.engine.grammar import GrammarCompiler
from fastinfer.errors import CheckpointFormatError, RequestError, UnsupportedModelError
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.chat_template import render
from fastinfer.tokenizers.tokenizer import Detokenizer, Tokenizer
from fastinfer.tokenizers.vocabulary import metaspace_bytes

PIECES = [*" ".join(TEXT).split(" "), " ", "  ", "\n", "\t", "é", "😀", "\x00", "<s>", "</s>", "<|im_end|>", "<think>"]

KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "gemma-like": gemma_like,
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tokenizer") / request.param, KINDS[request.param]())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A byte-level tokenizer that a test may spoil."""
    return save(tmp_path / "model", byte_level())


def strings() -> Iterator[str]:
    rng = random.Random(0)
    yield from ["", *TEXT, *PIECES]
    for _ in range(400):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 9)))


@pytest.mark.parametrize("parse_special", [True, False])
def test_ids_equal_transformers(tokenizer: Tokenizer, reference: Any, parse_special: bool) -> None:
    for text in strings():
        for add in (True, False):
            expected = reference.encode(text, add_special_tokens=add, split_special_tokens=not parse_special)
            assert tokenizer.encode(text, add, parse_special) == expected, repr(text)


def test_decoding_equals_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for text in strings():
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if text[:1] == " " and tokenizer._vocabulary.to_bytes is metaspace_bytes:
                continue  # the reference takes away the text's own spaces, too
            assert tokenizer.decode(ids, skip, continues=False) == expected, repr(text)


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_any_text(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assume("▁" not in text)
    ids = tokenizer.encode(text, parse_special=False)
    assert ids == reference.encode(text, split_special_tokens=True)
    if not isinstance(reference.backend_tokenizer.model, Unigram):  # has no token for every character
        assert tokenizer.decode(ids, continues=False) == text
    detokenizer = Detokenizer(tokenizer)
    pieces = [*(detokenizer.add(i) for i in ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_names(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.vocab_size == len(reference)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.bos_id == reference.bos_token_id
    assert tokenizer.eos_ids == set(reference.convert_tokens_to_ids(["</s>", "<|im_end|>"]))
    assert tokenizer.control_ids == set(reference.convert_tokens_to_ids(SPECIAL))
    assert tokenizer.decode(tokenizer.encode("<think>", add_special_tokens=False)) == "<think>"


def test_answers_keep_their_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", byte_fallback()))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the fox"
    assert tokenizer.decode(ids, continues=False) == "the fox"
    assert tokenizer.token_bytes(tokenizer.encode("\x00")[-1]) == b"\x00"


def test_structured_output_begins_without_a_space(tmp_path: Path) -> None:
    """Padding ids of the model are never allowed, either."""
    pytest.importorskip("llguidance")
    folder = save(tmp_path / "model", byte_fallback())
    write(folder, "config.json", {"vocab_size": 500})
    tokenizer = Tokenizer.from_folder(folder)
    compiler = GrammarCompiler(tokenizer, vocab_size=512)
    grammar = compiler.submit(StructuredOutputsParams(regex="the [a-z]+")).result()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    grammar.fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert {tokenizer.token_bytes(int(i)) for i in allowed} & {b"t", b"th", b"the"}
    assert all(b"the ".startswith(tokenizer.token_bytes(int(i)) or b"?") for i in allowed)


def test_two_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", byte_level()))
    text = "the </s> " * 50
    expected = {parse: tokenizer.encode(text, parse_special=parse) for parse in (True, False)}
    assert expected[True] != expected[False]

    def encode(parse_special: bool) -> bool:
        return all(tokenizer.encode(text, parse_special=parse_special) == expected[parse_special] for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(encode, [True, False]))


@pytest.mark.parametrize(
    ("config", "prefix"), [({}, ["<s>"]), ({"add_bos_token": True}, ["<s>"]), ({"add_bos_token": False}, [])]
)
def test_beginning_of_text(tmp_path: Path, config: dict[str, Any], prefix: list[str]) -> None:
    folder = save(tmp_path / "model", byte_level(), **config)
    tokenizer = Tokenizer.from_folder(folder)
    begin = [tokenizer.bos_id] if prefix else []
    assert tokenizer.encode("the") == begin + tokenizer.encode("the", add_special_tokens=False)
    # The same where tokenizer.json adds nothing, unless tokenizer_config.json says so.
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    begin = begin if config else []
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the") == begin + tokenizer.encode("the", add_special_tokens=False)


def test_a_template_with_an_end_token(saved: Path) -> None:
    backend = Backend.from_file(str(saved / "tokenizer.json"))
    special = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    backend.save(str(saved / "tokenizer.json"))
    ids = Tokenizer.from_folder(saved).encode("the")
    assert (ids[0], ids[-1]) == (special[0][1], special[1][1])


@pytest.mark.parametrize("has_thinker", [False, True])
def test_end_tokens_of_all_files(has_thinker: bool, saved: Path) -> None:
    write(saved, "generation_config.json", {"eos_token_id": [7, 8]})
    config = {"text_config": {"eos_token_id": 9, "vocab_size": 300}}
    write(saved, "config.json", {"thinker_config": config} if has_thinker else config)
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.eos_ids == {2, 3, 7, 8, 9}
    assert tokenizer.eos_token == "</s>"


def test_names_of_other_files(saved: Path) -> None:
    write(saved, "tokenizer_config.json", {})
    write(saved, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = Tokenizer.from_folder(saved)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    (saved / "special_tokens_map.json").unlink()
    write(saved, "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    tokenizer = Tokenizer.from_folder(saved)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    write(saved, "tokenizer_config.json", {"bos_token": None})
    assert Tokenizer.from_folder(saved).bos_id is None


def test_a_model_with_more_ids_than_tokens(saved: Path) -> None:
    size = Tokenizer.from_folder(saved).vocab_size
    write(saved, "config.json", {"vocab_size": size + 3})
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.control_ids >= {size, size + 1, size + 2}
    for skip in (True, False):
        assert tokenizer.decode([size, *tokenizer.encode("the", False), size + 2], skip) == "the"


def test_added_tokens_with_gaps_keep_their_ids(saved: Path) -> None:
    values = json.loads((saved / "tokenizer.json").read_text())
    think = values["added_tokens"][-1]
    size = think["id"] + 1
    values["added_tokens"].append({**think, "content": "<far>", "id": size + 9, "special": True})
    write(saved, "tokenizer.json", values)
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.encode("the<far>", False)[-1] == size + 9
    assert tokenizer.decode([size + 9], skip_special_tokens=False) == "<far>"
    assert tokenizer.decode([size]) == ""
    assert tokenizer.vocab_size == size + 10
    # An id that is taken cannot be kept.
    values["added_tokens"][-1]["id"] = 5
    write(saved, "tokenizer.json", values)
    with pytest.raises(CheckpointFormatError, match="have the same id 5"):
        Tokenizer.from_folder(saved)


def test_a_list_of_tokens_has_no_gaps(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", unigram())
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"][-1]["id"] += 1
    write(folder, "tokenizer.json", values)
    with pytest.raises(CheckpointFormatError, match="added token '<think>' cannot have the id"):
        Tokenizer.from_folder(folder)


def test_a_marker_that_its_file_calls_text_cannot_be_spelled(saved: Path) -> None:
    values = json.loads((saved / "tokenizer.json").read_text())
    end = next(token for token in values["added_tokens"] if token["content"] == "<|im_end|>")
    end["special"] = False
    write(saved, "tokenizer.json", values)
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [end["id"]]
    assert end["id"] not in tokenizer.encode("<|im_end|>", parse_special=False)
    assert end["id"] in tokenizer.eos_ids & tokenizer.control_ids


def test_a_special_token_known_to_the_model_alone(saved: Path) -> None:
    values = json.loads((saved / "tokenizer.json").read_text())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != "</s>"]
    write(saved, "tokenizer.json", values)
    tokenizer = Tokenizer.from_folder(saved)
    assert tokenizer.encode("the</s>")[-1] == 2
    assert tokenizer.decode([2]) == ""


def test_padding_and_truncation_are_left_out(saved: Path) -> None:
    expected = Tokenizer.from_folder(saved).encode(TEXT[0])
    backend = Backend.from_file(str(saved / "tokenizer.json"))
    backend.enable_padding(length=400)
    backend.enable_truncation(3)
    backend.save(str(saved / "tokenizer.json"))
    assert Tokenizer.from_folder(saved).encode(TEXT[0]) == expected


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_for_tools(saved: Path, in_files: bool) -> None:
    """Line breaks and spaces at its ends are those that it has alone."""
    default = "\n  {% if messages %}\n{{ messages[0].content }}\n  {% endif %}\n   "
    with_tools = "{% macro names() %}{{ tools | map(attribute='name') | join }}{% endmacro %}\n{{ names() }}\n\n"
    if in_files:
        write(saved, "chat_template.jinja", default)
        (saved / "additional_chat_templates").mkdir()
        write(saved, "additional_chat_templates/tool_use.jinja", with_tools)
    else:
        named = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": default}]
        write(saved, "tokenizer_config.json", {"chat_template": named})
    joined = Tokenizer.from_folder(saved).chat_template
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(saved)
    messages = [{"role": "user", "content": "Hello"}]
    for tools in (None, [{"name": "add"}], []):
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=False)
        assert render(joined, messages, tools=tools) == expected


def test_chat_template(saved: Path) -> None:
    assert Tokenizer.from_folder(saved).chat_template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "list"}]
    write(saved, "tokenizer_config.json", {"chat_template": named})
    template = Tokenizer.from_folder(saved).chat_template
    assert render(template, [{"role": "user", "content": "hello"}]) == "list"
    write(saved, "tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"})
    template = Tokenizer.from_folder(saved).chat_template
    assert render(template, [{"role": "user", "content": "hello"}]) == "hello"
    write(saved, "chat_template.json", {"chat_template": "json"})
    assert Tokenizer.from_folder(saved).chat_template == "json"
    write(saved, "chat_template.jinja", "jinja é")
    assert Tokenizer.from_folder(saved).chat_template == "jinja é"


def test_templates_cannot_reach_python(saved: Path) -> None:
    write(saved, "chat_template.jinja", "{{ messages.__class__.__base__.__subclasses__() }}")
    template = Tokenizer.from_folder(saved).chat_template
    with pytest.raises(UnsupportedModelError, match="not safe to run"):
        render(template, [{"role": "user", "content": "hello"}])


def test_code_beside_the_tokenizer_is_not_run(saved: Path) -> None:
    write(saved, "tokenization.py", "raise SystemExit")
    write(saved, "config.json", {"auto_map": {"AutoTokenizer": "tokenization.T"}, "vocab_size": 400})
    write(saved, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization.T", None]}})
    assert Tokenizer.from_folder(saved).encode("the")


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=r"expected a tokenizer\.json, but it is missing; transformers"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.model alone is not read; transformers writes one"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("tokenizer.json", "{", "not a valid tokenizer.json"),
        ("tokenizer.json", "\udcff", "not UTF-8"),
        ("tokenizer.json", {"version": "1.0", "added_tokens": [{}]}, "not a valid tokenizer.json"),
        ("tokenizer_config.json", "[]", "expected a JSON object, got list"),
        ("tokenizer_config.json", {"bos_token": 1}, "bos_token: expected str, got 1"),
        ("tokenizer_config.json", {"bos_token": {"content": 1}}, "bos_token.content: expected str, got 1"),
        ("tokenizer_config.json", {"eos_token": "<gone>"}, "'<gone>'"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token: expected bool, got 'yes'"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template: expected str, got 1"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "chat_template[0]: expected dict, got 'x'"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template[0].template is missing"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": 5}]},
            "chat_template[0].template: expected str, got 5",
        ),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id: expected token ids, got '2'"),
        ("generation_config.json", {"eos_token_id": [2, True]}, "eos_token_id: expected token ids, got True"),
        ("config.json", {"eos_token_id": 10**6}, "expected token ids below 401 for the special tokens, got 1000000"),
        ("config.json", {"vocab_size": 10**12}, "vocab_size: expected 0 to 4194304, got 1000000000000"),
    ],
)
def test_bad_files(saved: Path, name: str, value: Any, part: str) -> None:
    if isinstance(value, str):
        (saved / name).write_bytes(value.encode(errors="surrogateescape"))
    else:
        write(saved, name, value)
    with pytest.raises(CheckpointFormatError) as caught:
        Tokenizer.from_folder(saved)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Metaspace(replacement="_"), "Metaspace"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace \\+ Fuse"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 0, 1)]), "Replace \\+ Strip"),
        (None, "None"),
    ],
)
def test_other_decoders_are_refused(saved: Path, decoder: Any, kind: str) -> None:
    values = json.loads((saved / "tokenizer.json").read_text())
    values["decoder"] = json.loads(decoder.__getstate__()) if decoder else None
    write(saved, "tokenizer.json", values)
    with pytest.raises(UnsupportedModelError, match=f"decoder {kind} is not supported; known are ByteLevel"):
        Tokenizer.from_folder(saved)


def test_ids_outside_are_refused(saved: Path) -> None:
    with pytest.raises(RequestError, match="expected 0 to 400, got 401"):
        Tokenizer.from_folder(saved).decode([401])
