"""Grammars on the default model's vocabulary, walked by a model that takes any allowed token."""

import json
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.json_schemas import SCHEMAS

from fastinfer.engine import grammar as grammar_module
from fastinfer.engine.grammar import MAX_COMPILED, SHORT_CHARS, Grammar, GrammarCompiler
from fastinfer.errors import RequestError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.tokenizer import Tokenizer

EXTRA = 77  # columns that the logits have beyond the tokenizer's vocabulary
CLOSING = b'"]}@'


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(model_path))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + EXTRA)


def compiled(compiler: GrammarCompiler, **fields: Any) -> Grammar:
    return compiler.submit(StructuredOutputsParams(**fields)).result(timeout=60)


def mask(grammar: Grammar, compiler: GrammarCompiler) -> list[int]:
    """The tokens that may come next."""
    return np.flatnonzero(mask_bits(grammar, compiler)).tolist()


def mask_bits(grammar: Grammar, compiler: GrammarCompiler) -> np.ndarray:
    words = np.full(-(-compiler.vocab_size // 32), -1, np.int32)
    grammar.fill_mask(words)
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)


class Walker:
    """Random texts that follow a grammar; what must hold at every step is checked on the way."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        self.compiler, self.tokenizer = compiler, tokenizer
        width = -(-compiler.vocab_size // 32) * 32
        texts = [tokenizer.token_bytes(i, skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
        self.closing = np.zeros(width, bool)
        self.closing[: len(texts)] = [bool(set(CLOSING).intersection(text)) for text in texts]
        self.never = np.ones(width, bool)
        self.never[: len(texts)] = False
        self.never[list(tokenizer.control_ids - tokenizer.eos_ids)] = True
        self.ends = sorted(tokenizer.eos_ids)

    def walk(self, grammar: Grammar, seed: int, max_tokens: int = 300) -> list[int] | None:
        """The tokens of a text without its end; None where it does not end in time.

        Half of them close something if they can, because most tokens only make a string longer.
        """
        grammar = grammar.copy()
        draw = random.Random(seed)
        tokens: list[int] = []
        for _ in range(max_tokens):
            allowed = mask_bits(grammar, self.compiler)
            assert not (allowed & self.never).any()
            may_end = bool(allowed[self.ends[0]])
            assert (allowed[self.ends] == may_end).all()
            count = int(allowed.sum())
            assert grammar.finished == (may_end and count == len(self.ends))
            # Tokens are forced where there is one choice, and only there.
            forced = grammar.forced_tokens()
            assert forced[:1] == (np.flatnonzero(allowed).tolist() if count == 1 else [])
            if may_end and (grammar.finished or draw.random() < 0.5):
                grammar.accept(draw.choice(self.ends))
                assert grammar.finished
                return tokens
            allowed[self.ends] = False
            closing = allowed & self.closing
            tokens.append(
                int(draw.choice(np.flatnonzero(closing if closing.any() and draw.random() < 0.5 else allowed)))
            )
            grammar.accept(tokens[-1])
        return None


@pytest.fixture(scope="module")
def walker(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Walker:
    return Walker(compiler, tokenizer)


@pytest.mark.parametrize("name", SCHEMAS)
def test_completed_texts_validate(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    grammar = compiled(compiler, json=SCHEMAS[name])
    texts = []
    for seed in range(8):
        tokens = walker.walk(grammar, seed)
        if tokens is not None:
            texts.append(tokenizer.decode(tokens))
            validator.validate(json.loads(texts[-1]))
    assert len(texts) >= 6
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    "regex",
    [
        "[a-z]{3,8}",
        r"\d{1,3}(\.\d\d)?",
        "(yes|no)( sir)?",
        'a/ | "zzz"',  # what would end a quoted expression
        "a/\nstart: /b",
        "^(ab)+$",
        r"[^\x00-\x7F]{2,4}",
        "(?i)select",
        r"<\|im_end\|>x?",  # the spelling of a special token is text like any other
    ],
)
def test_regex(regex: str, compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    grammar = compiled(compiler, regex=regex)
    walks = [walker.walk(grammar, seed) for seed in range(8)]
    texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in walks if tokens is not None]
    assert len(texts) >= 6
    assert all(re.fullmatch(regex, text) for text in texts)


def test_choice(compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    choices = ["yes", "yes sir", "no", 'a "quote"\\n', "naïve 日本", "two\nlines\0", "/*.+?|(x)[y]{2}$^#", " - "]
    grammar = compiled(compiler, choice=choices)
    found = set()
    for seed in range(60):
        tokens = walker.walk(grammar, seed)
        assert tokens is not None
        found.add(tokenizer.decode(tokens))
    assert found == set(choices)


GBNF = 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"\n'
LARK = 'start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"\n'


@pytest.mark.parametrize("grammar", [GBNF, LARK])
def test_context_free_grammars(grammar: str, compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    matcher = compiled(compiler, grammar=grammar)
    texts = [tokenizer.decode(tokens) for seed in range(12) if (tokens := walker.walk(matcher, seed)) is not None]
    assert len(texts) >= 4
    assert any("(" in text for text in texts)
    for text in texts:
        while "(" in text:
            text, before = re.sub(r"\(\d+(,\d+)*\)", "1", text), text
            assert text != before, "brackets are not balanced"
        assert re.fullmatch(r"\d+(,\d+)*", text)


def test_any_json_object(compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    grammar = compiled(compiler, json_object=True)
    texts = [tokenizer.decode(tokens) for seed in range(8) if (tokens := walker.walk(grammar, seed)) is not None]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


TOOLS = {
    "structures": [
        {
            "begin": f"<call={name}>",
            "schema": {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"]}
            | {"additionalProperties": False},
            "end": "</call>",
        }
        for name, values in (("add", [1, 2]), ("drop", ["a"]))
    ],
    "triggers": ["<call="],
}


@pytest.mark.parametrize(
    ("text", "num_chars"),
    [
        ("Free text, even { and < and <cal.", None),
        ('Well: <call=add>{"x": 2}</call> and <call=drop>{"x": "a"}</call>.', None),
        ('<call=add>{"x": 3}</call>', len('<call=add>{"x": ')),
        ('<call=add>{"y": 1}</call>', len('<call=add>{"')),
        ('<call=other>{"x": 1}</call>', len("<call=")),
        ('<call=drop>{"x": "a"} </call>', len('<call=drop>{"x": "a"}')),
    ],
)
def test_structural_tags(text: str, num_chars: int | None, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Text is free up to a trigger, and again behind the end."""
    grammar = compiled(compiler, structural_tag=TOOLS)
    letters = [token for letter in text for token in tokenizer.encode(letter, parse_special=False)]
    assert tokenizer.decode(letters) == text
    if num_chars is None:
        tokens = [*letters, *tokenizer.eos_ids]
        assert grammar.validate(tokens) == len(tokens)
        assert grammar.validate(tokenizer.encode(text, parse_special=False)) > 0
    else:
        assert grammar.validate(letters) == num_chars


def test_a_text_may_not_end_inside_a_tag(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiled(compiler, structural_tag=json.dumps(TOOLS))
    for token in tokenizer.encode('<call=add>{"x"'):
        grammar.accept(token)
    assert not set(mask(grammar, compiler)) & tokenizer.eos_ids
    assert tokenizer.decode(grammar.forced_tokens()).startswith(":")


def test_a_trigger_that_is_a_special_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The token itself is the trigger, and its spelling is plain text."""
    structure = {"begin": "<file_sep>", "schema": {"const": 1}, "end": ""}
    grammar = compiled(compiler, structural_tag={"structures": [structure], "triggers": ["<file_sep>"]})
    [special] = tokenizer.encode("<file_sep>")
    assert special in tokenizer.control_ids
    tokens = [*tokenizer.encode("a"), special, *tokenizer.encode("1 b"), *tokenizer.eos_ids]
    assert grammar.validate(tokens) == len(tokens)
    tokens = [*tokenizer.encode("a"), special, *tokenizer.encode("2")]
    assert grammar.validate(tokens) == len(tokens) - 1


def test_text_between_values_is_that_of_json_dumps(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    value = {"a": [1, {"b": "x  y"}], "c": {}, "d": []}
    grammar = compiled(compiler, json={"type": "object"})
    for text, valid in [
        (json.dumps(value), True),
        (json.dumps(value, indent=1), False),
        (json.dumps(value, separators=(",", ":")), False),
        (json.dumps(value) + " ", False),
        (" " + json.dumps(value), False),
    ]:
        tokens = [*tokenizer.encode(text), *tokenizer.eos_ids]
        assert (grammar.validate(tokens) == len(tokens)) == valid, text


def test_properties_come_in_the_schema_s_order(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    assert tokenizer.decode(compiled(compiler, json=schema).forced_tokens()) == '{"b": 1, "a": 2}'


def test_forced_tokens_reach_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiled(compiler, choice=["The quick brown fox"])
    forced = grammar.forced_tokens()
    assert forced == tokenizer.encode("The quick brown fox")
    assert grammar.validate(forced) == len(forced)
    for token in forced:
        assert not grammar.finished
        assert mask(grammar, compiler) == [token]
        grammar.accept(token)
    assert grammar.finished
    assert grammar.forced_tokens() == []
    assert mask(grammar, compiler) == sorted(tokenizer.eos_ids)


def state(grammar: Grammar, compiler: GrammarCompiler) -> tuple[list[int], list[int], bool]:
    return mask(grammar, compiler), grammar.forced_tokens(), grammar.finished


@pytest.mark.parametrize("name", ["recursion", "pattern", "optional properties", "enum", "any object"])
def test_rollback_never_happened(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    """Also back over the end, and from a state that refused a token."""
    template = compiled(compiler, json=SCHEMAS[name])
    for seed in range(4):
        grammar = template.copy()
        text = walker.walk(template, seed)
        assert text is not None
        tokens = [*text, *sorted(tokenizer.eos_ids)]
        states = []
        for token in tokens:
            states.append(state(grammar, compiler))
            grammar.accept(token)
        states.append(state(grammar, compiler))
        draw = random.Random(seed)
        position = len(tokens)
        for _ in range(20):
            with pytest.raises(RequestError):
                grammar.accept(tokenizer.encode("\x7f")[0] if position < len(text) else tokenizer.encode("z")[0])
            back = draw.randint(0, position)
            grammar.rollback(back)
            position -= back
            assert state(grammar, compiler) == states[position]
            forward = draw.randint(position, len(tokens))
            for token in tokens[position:forward]:
                grammar.accept(token)
            position = forward
            assert state(grammar, compiler) == states[position]


def test_replay_repairs_any_state(compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    template = compiled(compiler, json=SCHEMAS[sorted(SCHEMAS)[0]])
    text = walker.walk(template, 1)
    assert text is not None
    tokens = [*text, min(tokenizer.eos_ids)]
    expected, grammar = template.copy(), template.copy()
    for count in (0, 1, len(text) // 2, len(text), len(tokens)):
        grammar._matcher.consume_tokens(text[:3])  # as an interrupt leaves it, before the tokens are counted
        grammar.replay(tokens[:count])
        while expected._num_accepted + expected._num_ends < count:
            expected.accept(tokens[expected._num_accepted])
        assert state(grammar, compiler) == state(expected, compiler)
        grammar.rollback(count)
        assert state(grammar, compiler) == state(template.copy(), compiler)
    with pytest.raises(RequestError, match="does not allow token"):
        grammar.replay([*text, *text])


def test_rollback_of_more_than_there_is(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiled(compiler, regex="ab*")
    grammar.accept(tokenizer.encode("a")[0])
    grammar.accept(min(tokenizer.eos_ids))
    for n in (3, -1):
        with pytest.raises(ValueError, match=f"^n: expected 0 to 2, got {n}$"):
            grammar.rollback(n)
    grammar.rollback(2)
    assert state(grammar, compiler) == state(compiled(compiler, regex="ab*"), compiler)


def test_a_copy_is_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiled(compiler, regex="a(b|cd)*")
    grammar.accept(tokenizer.encode("a")[0])
    before = state(grammar, compiler)
    copy = grammar.copy()
    assert state(copy, compiler) == before
    copy.accept(tokenizer.encode("c")[0])
    forked = state(copy, compiler)
    assert forked != before
    assert state(grammar, compiler) == before
    grammar.accept(min(tokenizer.eos_ids))
    assert grammar.copy().finished
    assert state(copy, compiler) == forked
    copy.rollback(2)
    assert state(copy, compiler) == state(compiled(compiler, regex="a(b|cd)*"), compiler)


def test_an_id_that_no_token_has_is_no_draft(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiled(compiler, regex="[a-z]+")
    [letter] = tokenizer.encode("a", add_special_tokens=False)
    assert grammar.validate([letter, tokenizer.vocab_size, letter]) == 1
    assert grammar.validate([tokenizer.vocab_size]) == 0
    grammar.accept(letter)


def test_validate_agrees_with_accept(compiler: GrammarCompiler, tokenizer: Tokenizer, walker: Walker) -> None:
    """And changes nothing."""
    draw = random.Random(0)
    end, other_end = sorted(tokenizer.eos_ids)
    for name in ("recursion", "optional properties", "integer range", "enum"):
        template = compiled(compiler, json=SCHEMAS[name])
        for seed in range(10):
            text = walker.walk(template, seed)
            assert text is not None
            tokens = [*text, end, other_end]
            start = draw.randint(0, len(tokens))
            drafts = tokens[start:] + draw.choice([[], [end], text[:2]])
            if drafts and draw.random() < 0.7:
                drafts[draw.randrange(len(drafts))] = draw.choice([end, draw.randrange(tokenizer.vocab_size), *text])
            grammar = template.copy()
            for token in tokens[:start]:
                grammar.accept(token)
            before = state(grammar, compiler)
            count = grammar.validate(drafts)
            assert state(grammar, compiler) == before
            accepted = 0
            try:
                for token in drafts:
                    grammar.accept(token)
                    accepted += 1
            except RequestError:
                pass
            assert count == accepted
    assert template.validate([]) == 0


def test_the_end_of_sequence(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """It is allowed exactly where the text may end, and after itself."""
    grammar = compiled(compiler, regex="ab?")
    a, b, end = tokenizer.encode("a")[0], tokenizer.encode("b")[0], max(tokenizer.eos_ids)
    assert not tokenizer.eos_ids.intersection(mask(grammar, compiler))
    with pytest.raises(RequestError, match=f"^structured output: the grammar does not allow token {end} here$"):
        grammar.accept(end)
    grammar.accept(a)
    assert tokenizer.eos_ids < set(mask(grammar, compiler))
    assert not grammar.finished
    grammar.accept(end)
    assert grammar.finished
    with pytest.raises(RequestError):
        grammar.accept(b)
    assert mask(grammar, compiler) == sorted(tokenizer.eos_ids)
    grammar.rollback(1)
    grammar.accept(b)
    assert grammar.finished  # the text is complete


def test_the_mask_s_shape(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Rows wider than the vocabulary are forbidden beyond it; what is no such row is refused."""
    grammar = compiled(compiler, regex="a*")
    rows = np.full((3, -(-compiler.vocab_size // 32)), -1, np.int32)
    grammar.fill_mask(rows[1])
    assert (rows[[0, 2]] == -1).all()
    assert (rows[1, -(-tokenizer.vocab_size // 32) :] == 0).all()
    assert rows[1].any()
    narrow = tokenizer.vocab_size // 32 - 1
    for words in (rows, rows[1].astype(np.int64), rows[1, :narrow], np.empty((rows.shape[1], 2), np.int32)[:, 0]):
        with pytest.raises(ValueError, match=r"^words: expected a contiguous"):
            grammar.fill_mask(words)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"type": "something"}}, "Invalid type: something"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"$ref": "#"}}, "no text matches"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text"),
        ({"json": {"$ref": "http://localhost/x"}}, "Resource"),
        ({"json": {"$ref": "#/$defs/none"}}, ""),
        ({"json": {"not": {}}}, "Unimplemented"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "Unimplemented"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}},
            "oneOf",
        ),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"properties": 7}}, ""),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(6)]}},
            "too (big|large|complex)",
        ),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\x00-\u{10FFFF}]"}, "no text matches"),
        ({"regex": "(?:" * 1000 + "a" + ")" * 1000}, "nested"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": "start: (("}, ""),
        ({"grammar": "no grammar at all"}, ""),
        ({"structural_tag": TOOLS | {"structures": [{"begin": "<call=", "schema": {"type": 7}, "end": ""}]}}, ""),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": t, "schema": {}, "end": ""} for t in ("<file_sep>", "<other>")],
                    "triggers": ["<file_sep>", "<other>"],
                }
            },
            "triggers must be special tokens of the model all or none",
        ),
    ],
)
def test_what_cannot_be_enforced(fields: dict[str, Any], reason: str, compiler: GrammarCompiler, capfd: Any) -> None:
    """One short line names the field and the reason, nothing is printed, and the next grammar compiles."""
    field = next(iter(fields))
    with pytest.raises(
        RequestError, match=rf"^{field} cannot be enforced: [^\n]*{reason}[^\n]*, got [^\n]*$"
    ) as caught:
        compiled(compiler, **fields)
    assert len(str(caught.value)) < 260
    assert capfd.readouterr() == ("", "")
    assert compiled(compiler, regex="ok").forced_tokens()


def test_equal_parameters_compile_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compile = grammar_module._compile

    def counted(params: StructuredOutputsParams, *args: Any) -> Grammar:
        calls.append(params)
        return compile(params, *args)

    monkeypatch.setattr(grammar_module, "_compile", counted)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    schemas = list(SCHEMAS.values())[:20]
    futures = [compiler.submit(StructuredOutputsParams(json=schemas[i % 20])) for i in range(200)]
    grammars = [future.result(timeout=60) for future in futures]
    assert len(calls) == 20
    assert len({id(grammar._matcher) for grammar in grammars}) == 200
    token = mask(grammars[0], compiler)[0]
    grammars[0].accept(token)
    assert grammars[20].validate([token]) == 1
    grammars[20].rollback(0)
    with pytest.raises(ValueError, match="n: expected 0 to 0"):
        grammars[20].rollback(1)


def test_the_least_recently_used_is_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(grammar_module, "_compile", lambda params, *_: calls.append(params.regex) or FakeGrammar())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    for i in range(MAX_COMPILED):
        compiled(compiler, regex=f"a{i}")
    compiled(compiler, regex="a0")  # used again
    compiled(compiler, regex="b")  # pushes a1 out
    compiled(compiler, regex="a0")
    assert calls[-1] == "b"
    compiled(compiler, regex="a1")
    assert calls[-1] == "a1"


class FakeGrammar:
    def copy(self) -> "FakeGrammar":
        return FakeGrammar()


def test_time_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too long fails, is not remembered, and holds up nothing else."""
    release = threading.Event()
    slow = {"(slow)"}

    def compile(params: StructuredOutputsParams, *_: Any) -> FakeGrammar:
        if params.regex in slow:
            release.wait(60)
        return FakeGrammar()

    monkeypatch.setattr(grammar_module, "_compile", compile)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, time_limit=0.2)
    compiled(compiler, regex="first")  # builds the trie, which does not count
    futures = [compiler.submit(StructuredOutputsParams(regex="(slow)")) for _ in range(3)]
    errors = [future.exception(timeout=60) for future in futures]
    assert {str(error) for error in errors} == {"structured output: not compiled within 0.2 s"}
    assert len({id(error) for error in errors}) == 3
    compiled(compiler, regex="next")
    slow.clear()
    compiled(compiler, regex="(slow)")
    release.set()


def test_submit_does_not_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(grammar_module, "_compile", lambda *_: release.wait(60) and FakeGrammar())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    future = compiler.submit(StructuredOutputsParams(regex="a"))
    aborted = compiler.submit(StructuredOutputsParams(regex="a"))
    assert aborted.cancel()
    assert not future.done()
    release.set()
    assert isinstance(future.result(timeout=60), FakeGrammar)
    assert aborted.cancelled()


def test_a_grammar_too_complex_to_follow(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that takes too long ends its own request, and other grammars go on."""
    grammar = compiled(compiler, regex="[ab]*")
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "MASK_SECONDS", -1.0)
        with pytest.raises(RequestError, match=r"^structured output: a token takes"):
            mask(grammar, compiler)
        with pytest.raises(RequestError, match=r"^regex cannot be enforced: a token takes \d\.\d s, .*, got 'cd\*'$"):
            compiled(compiler, regex="cd*")
    assert mask(grammar, compiler)
    assert compiled(compiler, regex="cd*")


def test_without_llguidance(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with pytest.raises(RequestError, match=r"^structured output needs .*: pip install 'fastinfer\[structured\]'$"):
        compiled(compiler, regex="a")


def test_a_model_without_end_of_sequence(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "eos_ids", frozenset())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with pytest.raises(RequestError, match="end-of-sequence token"):
        compiled(compiler, regex="a")


def test_logits_narrower_than_the_vocabulary(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least 49152, got 49151$"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size - 1)


LONG = "a" * (SHORT_CHARS + 1)


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ([{"regex": f"{LONG}{i}"} for i in range(9)], {"regex": "ab"}),
        (
            [{"choice": [LONG[:4000], LONG[:4000], f"{LONG[:4000]}{i}"]} for i in range(9)],
            {"json": SCHEMAS["recursion"]},
        ),
        ([{"regex": f"b{i}"} for i in range(9)], {"regex": LONG}),
        ([{"json_object": True}, *({"regex": f"b{i}"} for i in range(9))], {"regex": LONG}),
    ],
    ids=["a short one behind long ones", "choices", "a long one behind short ones", "any object"],
)
def test_short_and_long_constraints_do_not_wait_for_each_other(
    slow: list[dict[str, Any]], fast: dict[str, Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, time_limit=60)
    may_compile, unhindered = threading.Event(), StructuredOutputsParams(**fast)

    def compile_when_allowed(params: StructuredOutputsParams, *_: object) -> FakeGrammar:
        assert params == unhindered or may_compile.wait(60)
        return FakeGrammar()

    monkeypatch.setattr(grammar_module, "_compile", compile_when_allowed)
    try:
        others = [compiler.submit(StructuredOutputsParams(**fields)) for fields in slow]
        compiler.submit(unhindered).result(10)
        assert not any(other.done() for other in others)
    finally:
        may_compile.set()
