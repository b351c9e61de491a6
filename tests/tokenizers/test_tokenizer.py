"""The tokenizer against transformers', on the same file, and the streaming of its text."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_tokenizer_file import write_tokenizer
from support.hf_tokenizers import byte_level, save
from tokenizers import pre_tokenizers

from fastinfer.errors import FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from fastinfer.tokenizers.tokenizer import Detokenizer, Tokenizer

PIECES = [
    *("hello", "World", " the", " and ", "ing", "don't", "I'LL", "we've", "x86_64", "naïve", "Ünïcödé", "ﬁ", "ß", "İ"),
    *("0", "7", "42", "1234567890", " 3.14", "1e-9", "0x1F", "²³", "½", "①", "٣٤", "Ⅷ", "१२"),
    *(
        " ",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\t\t",
        "\u00a0",
        "\u2003",
        "\u3000",
        "\u200b",
        "\ufeff",
        "\u2028",
    ),
    *("日本語", "中文字符", "한국어", "ไทย", "العربية", "עברית", "हिन्दी", "ქართული", "Ελληνικά", "Привет"),
    *(
        "😀",
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "🇩🇪",
        "❤️",
        "e\u0301",
        "a\u0308\u0323",
        "\u0301",
        "\U0001d518\U0001d52b",
        "𒀀",
        "\U000e0041",
    ),
    *("\x00", "\x01", "\x04", "\x07", "\x1b[31m", "\x7f", "\x85", "\ufffd", "\uffff", "\U00040000", "\U0010ffff"),
    *("def f(x):\n    return x**2\n", "{'a': [1, 2]}", "<p>&amp;</p>", "// --> !=", "\\frac{a}{b}", "`~!@#$%^&*()_+-="),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_", "end|>", "<s>", "</s>", "<unk>", "[INST]"),
    *("a" * 40, "=" * 33, "ab" * 20, "\n" * 9, " " * 17),
]


def odd_strings(count: int = 1200) -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(2, 9))) for _ in range(count // 2)]
    ranges = [(0, 0x250), (0x300, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x1F000, 0x1FB00), (0x10000, 0x110000)]
    points = [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 12))) for _ in range(count // 2)
    ]
    return ["", *PIECES, *mixed, *points]


STRINGS = odd_strings()


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(model_path))


@pytest.fixture(scope="module")
def converted(model_path: Path) -> Any:
    """What transformers makes of the file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.fixture(scope="module")
def reference(converted: Any) -> Any:
    """transformers' tokenizer with the pre-tokenizer that the model was trained with.

    SmolLM2's own tokenizer.json cuts every digit off its neighbours (``Digits(individual_digits=True)``) before
    GPT-2's pattern; the conversion from GGUF knows no pre-tokenizer named "smollm" and leaves the first step out.
    """
    backend = converted.backend_tokenizer.from_str(converted.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend)


def encode_with(reference: Any, text: str, parse_special: bool = True) -> list[int]:
    return reference.encode(text, add_special_tokens=False, split_special_tokens=not parse_special)


def test_strings_are_many() -> None:
    assert len(set(STRINGS)) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("parse_special", [True, False])
def test_ids_equal_the_reference(tokenizer: Tokenizer, reference: Any, parse_special: bool) -> None:
    for text in STRINGS:
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert ids == encode_with(reference, text, parse_special), repr(text)


def test_conversion_differs_at_numbers_only(tokenizer: Tokenizer, converted: Any) -> None:
    """Without digits transformers' unchanged conversion agrees; with them this vocabulary shows who is right."""
    plain = [text for text in STRINGS if not any(char.isnumeric() for char in text)]
    assert len(plain) > 500
    for text in plain:
        assert tokenizer.encode(text) == encode_with(converted, text), repr(text)
    # Trained on single digits: no token joins a digit with anything. "  1" keeps its two spaces together.
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert {t for t in tokens if any(48 <= byte < 58 for byte in t)} == {b"%d" % digit for digit in range(10)}
    assert [tokens[i] for i in tokenizer.encode("  1")] == [b"  ", b"1"]
    assert [tokens[i] for i in encode_with(converted, "  1")] == [b" ", b" ", b"1"]


def test_decode_equals_the_reference(tokenizer: Tokenizer, reference: Any) -> None:
    rng = random.Random(1)
    lists = [tokenizer.encode(text) for text in STRINGS]
    lists += [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 30))] for _ in range(300)]
    # Single bytes, so that broken and overlong UTF-8 comes up often.
    short = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    lists += [rng.choices(short, k=rng.randint(1, 30)) for _ in range(300)]
    for skip in (True, False):
        for ids in lists:
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_round_trip(tokenizer: Tokenizer) -> None:
    """Decoding gives the text back, but for the few bytes that the vocabulary has no token for."""
    known = b"".join(tokenizer.token_bytes(i, skip_special_tokens=False) for i in range(tokenizer.vocab_size))
    unknown = bytes(set(range(256)) - set(known))
    # Control characters that never came up in training, lead bytes of unassigned planes, bytes outside UTF-8.
    assert unknown == bytes([4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])
    for text in STRINGS:
        expected = text.encode().translate(None, delete=unknown).decode(errors="replace")
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(), parse_special=st.booleans())
def test_any_text(tokenizer: Tokenizer, reference: Any, text: str, parse_special: bool) -> None:
    assert tokenizer.encode(text, parse_special=parse_special) == encode_with(reference, text, parse_special)


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_texts(tokenizer: Tokenizer, skip: bool) -> None:
    for text in STRINGS:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids, skip)
        whole = tokenizer.decode(ids, skip)
        assert "".join(pieces) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)
            assert pieces[-1] == ""


def test_some_control_tokens_are_kept(tokenizer: Tokenizer) -> None:
    [begin, end] = [tokenizer.encode(text)[0] for text in ("<|im_start|>", "<|im_end|>")]
    detokenizer = Detokenizer(tokenizer, kept=[begin])
    ids = [begin, *tokenizer.encode("Hello"), end]
    assert "".join(map(detokenizer.add, ids)) == "<|im_start|>Hello"


def test_stream_of_random_ids(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    short = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) < 3]
    for population in (range(tokenizer.vocab_size), short):
        for _ in range(500):
            ids = rng.choices(population, k=rng.randint(1, 40))
            pieces = stream(tokenizer, ids)
            # What was shown is never taken back: it is a prefix of the final text at every step.
            assert "".join(pieces) == tokenizer.decode(ids)


def test_stream_holds_back_parts_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a") + tokenizer.encode("𒀀")
    assert len(ids) == 5
    assert stream(tokenizer, ids) == ["a", "", "", "", "𒀀", ""]
    assert stream(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_names_of_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.chat_template is not None
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a", add_special_tokens=False)


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at position 2"):
        tokenizer.encode("ab\ud800c")


@pytest.mark.parametrize("text", [None, b"bytes", 7, ["a"]])
def test_no_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="expected a str"):
        tokenizer.encode(text)


@pytest.mark.parametrize("token_id", [-1, 49152, 2**31, 2**70])
def test_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"expected 0 to 49151, got {token_id}"):
        tokenizer.decode([token_id])
    with pytest.raises(RequestError, match=str(token_id)):
        Detokenizer(tokenizer).add(token_id)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "we'll  go 1234\n", ["we", "'ll", "Ġ", "Ġgo", "Ġ1234", "Ċ"]),
        ("smollm", "we'll  go 1234\n", ["we", "'ll", "Ġ", "Ġgo", "Ġ", "1", "2", "3", "4", "Ċ"]),
        ("llama-bpe", "WE'LL  go 1234?!\n", ["WE", "'LL", "Ġ", "Ġgo", "Ġ", "123", "4", "?!Ċ"]),
        ("tekken", "iPhone THEm 12 a/b\n", ["i", "Phone", "ĠTHEm", "Ġ", "1", "2", "Ġa", "/b", "Ċ"]),
        ("gpt-4o", "iPhone's THEm 1234 a/b\n", ["i", "Phone's", "ĠTHEm", "Ġ", "123", "4", "Ġa", "/b", "Ċ"]),
        ("smaug-bpe", "WE'LL  go 1234?!\n", ["WE", "'LL", "Ġ", "Ġgo", "Ġ", "123", "4", "?!Ċ"]),
        ("command-r", "we'll  go 1234\n", ["we", "'ll", "Ġ", "Ġgo", "Ġ", "1", "2", "3", "4", "Ċ"]),
        ("qwen2", "WE'LL  go 1234?!\n", ["WE", "'LL", "Ġ", "Ġgo", "Ġ", "1", "2", "3", "4", "?!Ċ"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in PRE_TOKENIZERS[name]().pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # A combining mark is part of the word.
        ("qwen2", "ab|\u0308c| |1|2"),
        ("qwen35", "ab\u0308c| |1|2"),
        ("qwen35", "WE|'LL| | go|?!\n"),
        ("glm4", "WE|'LL| | go| |123|4|?!\n"),
        ("minimax-m2", "i|Phone's| |123|4"),
        # Line ends apart from all else.
        ("laguna", "WE|'LL|?!|\n\n| | go|  |\n| |1|2"),
        ("minicpm5", "WE|'LL|  |123|4| go|?!\n"),
        # Line ends apart from punctuation.
        ("seed-coder", "go|?!|\n\n|1"),
        ("bailingmoe", "go|?\n\n| \n|1"),
        # Letters with a case are words; others are not, and keep the spaces before them.
        ("deepseek-llm", "Go| \u043d\u0430|  |1|2|?|\n"),
        ("deepseek-llm", "a|  \u05d0|,"),
        ("deepseek-llm", "\u05d0|   "),
        ("deepseek-llm", "\u10d0\u10d1|\u10a0"),
        ("deepseek-llm", "a|\u4e00\u4e01|b"),
        ("deepseek-coder", "a| | \u05d0|,| |1|2|\n"),
        # Digits by threes, East Asian text, and ASCII punctuation with the ASCII word behind it.
        ("deepseek-v3", "a|.go| |123|4| |\u4e00\u3042|b|?!\n"),
        # Han characters apart, with no space before them; the other letters of East Asian text are words.
        ("kimi-k2", "a| |\u4e00\u4e01|b\u3042|\u4e00"),
        ("kimi-k2", "i|Phone's| THEm| |123|4|?!\n|/|\u3007"),
        ("falcon", "we|'|ll|,| go| |123|45|!"),
        # Numbers by threes from the right.
        ("tiny_aya", "i|Phone's| |1|234|567| |12|abc"),
        ("afmoe", "a|.go| |12|345|\u4e00\u3042\uac00|b|?!\n"),
        ("exaone-moe", "We go o\u0308n| | |1|2|'ll| go|?\n|\n"),
        ("jais-2", "go|    | | |1| go|?\n|  \n|  "),
        # Each script apart, East Asian punctuation too, and every digit.
        ("youtu", "i|Phone's| |\uac00\u3131|\u3105|\u4e00\u3042|\uff0c\u3002|b| |1|2|?!\n/"),
        ("youtu", "a| |\u4e00|b|\u2026\u201c|C"),
    ],
)
def test_words(name: str, text: str) -> None:
    words = text.split("|")
    found = PRE_TOKENIZERS[name]().pre_tokenize_str("".join(words))
    assert ["".join(words)[begin:end] for _, (begin, end) in found] == words


def toy_file(tmp_path: Path, **changes: Any) -> GGUFFile:
    """Letters, merges "a b", "ab c", and the special tokens of several families. A value of None leaves a key out."""
    control, user_defined = ["<|eot_id|>", "<s>"], ["<think>", "tool call"]
    tokens = [*"abcdef", "ab", "abc", "fed", "<|eot_id|>", "<think>", "tool call", "<s>", *"Ã©Ċ", "Ã©"]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": ["a b", "ab c", "Ã ©"],
        "token_type": [3 if token in control else 4 if token in user_defined else 1 for token in tokens],
        "bos_token_id": tokens.index("<s>"),
    }
    return write_tokenizer(tmp_path / "toy.gguf", values | changes)


def test_toy_vocabulary(tmp_path: Path) -> None:
    toy = Tokenizer.from_gguf(toy_file(tmp_path))
    assert toy.encode("abcab<|eot_id|><think>tool calld") == [7, 6, 9, 10, 11, 3]
    assert toy.encode("<|eot_id|>ab", parse_special=False) == toy.encode("eotidab")
    # Control tokens are skipped, user-defined ones are text.
    assert toy.decode([6, 9, 10, 11]) == "ab<think>tool call"
    assert toy.decode([6, 9, 10, 11], skip_special_tokens=False) == "ab<|eot_id|><think>tool call"
    assert toy.eos_ids == {9}
    assert toy.eos_token == ""
    assert toy.chat_template is None


def test_end_tokens_named_by_the_file(tmp_path: Path) -> None:
    toy = Tokenizer.from_gguf(toy_file(tmp_path, eos_token_id=0, eot_token_id=1, eom_token_id=2))
    assert toy.eos_ids == {0, 1, 2, 9}


def test_ends_of_an_answer_in_a_list(tmp_path: Path) -> None:
    toy = Tokenizer.from_gguf(toy_file(tmp_path, eos_token_id=0, eos_token_ids=[0, 3, 5]))
    assert toy.eos_ids == {0, 3, 5, 9}
    assert toy.eos_token == "a"


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>", "<|endoftext|>"], {"<|end|>", "<|endoftext|>"}),  # Phi
        (["<turn|>", "<|tool_response>", "<|turn>"], {"<turn|>", "<|tool_response>"}),  # Gemma 4
        # Harmony: <|end|> ends the reasoning, and the answer follows.
        (["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {"<|return|>", "<|call|>", "<|endoftext|>"}),
        (["<|end|>", "<|return|>"], {"<|end|>"}),
    ],
)
def test_end_tokens_that_no_file_names(tmp_path: Path, names: list[str], ends: set[str]) -> None:
    tokens = [*"abcd", "ab", *names]
    types = [1] * 5 + [3] * len(names)
    toy = Tokenizer.from_gguf(
        toy_file(tmp_path, tokens=tokens, merges=["a b"], token_type=types, bos_token_id=None, eos_token_id=2)
    )
    assert {tokens[i] for i in toy.eos_ids} == {"c", *ends}
    backend = byte_level()
    backend.add_special_tokens(names)
    folder = Tokenizer.from_folder(save(tmp_path / "model", backend))
    assert {backend.id_to_token(i) for i in folder.eos_ids} == {"</s>", "<|im_end|>", *ends}


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_beginning_of_text(tmp_path: Path, pre: str, add_bos: bool | None, begins: bool) -> None:
    toy = Tokenizer.from_gguf(toy_file(tmp_path, pre=pre, add_bos_token=add_bos))
    assert toy.encode("ab") == ([12, 6] if begins else [6])
    assert toy.encode("ab", add_special_tokens=False) == [6]


@pytest.mark.parametrize(("add_eos", "ends"), [(True, [6, 0]), (False, [6]), (None, [6])])
def test_end_of_text(tmp_path: Path, add_eos: bool | None, ends: list[int]) -> None:
    toy = Tokenizer.from_gguf(toy_file(tmp_path, eos_token_id=0, add_eos_token=add_eos))
    assert toy.encode("ab") == ends
    assert toy.encode("ab", add_special_tokens=False) == [6]


def test_llama3_takes_whole_words_without_merges(tmp_path: Path) -> None:
    assert Tokenizer.from_gguf(toy_file(tmp_path, pre="llama3")).encode("fed", add_special_tokens=False) == [8]
    assert Tokenizer.from_gguf(toy_file(tmp_path, pre="gpt-2")).encode("fed") == [5, 4, 3]


def test_tokens_that_are_no_markers_are_found_in_any_text(tmp_path: Path) -> None:
    """As transformers finds them; control tokens and markers of conversations are not."""
    toy = Tokenizer.from_gguf(toy_file(tmp_path))
    assert toy.encode("abtool call<|eot_id|>d", parse_special=False) == [6, 11, *toy.encode("eotid"), 3]


def test_gemma4(tmp_path: Path) -> None:
    """Merges of characters with a marker for spaces, across words but not line ends; bytes where there is no token."""
    words = ["<unk>", "<bos>", "<|turn>", "\n", "\n\n", *"ab▁", "▁a", "b▁", "b▁a", "▁▁", "a\n"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = ["▁ a", "b ▁", "b ▁a", "▁ ▁", "\n \n"]
    types = [2, 3, 3, *(1 for _ in words[3:]), *(6 for _ in range(256))]
    values = {"model": "gemma4", "tokens": tokens, "merges": merges, "token_type": types, "bos_token_id": 1}
    toy = Tokenizer.from_gguf(write_tokenizer(tmp_path / "toy.gguf", {**values, "unknown_token_id": 0}))
    ids = toy.encode("ab a\n\nb  <|turn>é", add_special_tokens=False)
    assert [tokens[i] for i in ids] == ["a", "b▁a", "\n\n", "b▁", "▁", "<|turn>", "<0xC3>", "<0xA9>"]
    assert toy.decode(ids) == "ab a\n\nb  é"
    assert toy.encode("a")[0] == 1
    assert 2 not in toy.encode("<|turn>", parse_special=False)


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    assert Tokenizer.from_gguf(toy_file(tmp_path, pre="qwen2")).encode("e\u0301") == [16]
    assert Tokenizer.from_gguf(toy_file(tmp_path, pre="gpt-2")).encode("e\u0301") == [4]


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"model": "t5"}, UnsupportedModelError, "tokenizer model 't5' is not supported; known are gpt2"),
        ({"model": None}, GGUFFormatError, "'tokenizer.ggml.model' is missing"),
        ({"pre": "no-such"}, UnsupportedModelError, "'no-such' is not supported; known are default, gpt-2, exaone4"),
        ({"tokens": None}, GGUFFormatError, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": [1, 2]}, GGUFFormatError, "'tokenizer.ggml.tokens': expected list"),
        ({"tokens": ["a", "b", "ab", "a"]}, GGUFFormatError, "occur twice"),
        ({"merges": None}, GGUFFormatError, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["a z"]}, GGUFFormatError, "'tokenizer.ggml.merges'"),
        ({"merges": ["ab"]}, GGUFFormatError, "'tokenizer.ggml.merges'"),
        ({"merges": ["a b c"]}, GGUFFormatError, "'tokenizer.ggml.merges'"),
        ({"token_type": [1, 1]}, GGUFFormatError, "expected 17 token types, got 2"),
        ({"bos_token_id": 17}, GGUFFormatError, "'tokenizer.ggml.bos_token_id': expected 0 to 16, got 17"),
        ({"eos_token_id": -1}, GGUFFormatError, "'tokenizer.ggml.eos_token_id': expected 0 to 16, got -1"),
        ({"eot_token_id": "x"}, GGUFFormatError, "'tokenizer.ggml.eot_token_id': expected int, got 'x'"),
        ({"eos_token_ids": [3, 17]}, GGUFFormatError, "'tokenizer.ggml.eos_token_ids': expected integers of 0 to 16"),
        ({"eos_token_ids": [3, -1]}, GGUFFormatError, "'tokenizer.ggml.eos_token_ids': expected integers of 0 to 16"),
        ({"eos_token_ids": [0.5]}, GGUFFormatError, "'tokenizer.ggml.eos_token_ids': expected integers of 0 to 16"),
    ],
)
def test_bad_tokenizer_metadata(
    tmp_path: Path, changes: dict[str, Any], error: type[FastinferError], part: str
) -> None:
    file = toy_file(tmp_path, **changes)
    with pytest.raises(error) as caught:
        Tokenizer.from_gguf(file)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
