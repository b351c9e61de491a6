"""Allowed tokens, bad words, stop strings in the text and truncated prompts, against what the toy must give."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.toy import VOCAB_SIZE, ToyTokenizer, always_speculate, drain, greedy, logits_of, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer import RequestError, SamplingParams
from fastinfer.sampling_params import MAX_ALLOWED_TOKEN_IDS

PROMPT = [3, 1, 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def expected(prompt: list[int], count: int, is_allowed: Any) -> list[int]:
    """Greedy decoding where ``is_allowed(output, token)`` says what may come next."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        ranked = logits_of(tokens).argsort(descending=True).tolist()
        tokens.append(next(token for token in ranked if is_allowed(tokens[len(prompt) :], token)))
    return tokens[len(prompt) :]


def run(params: SamplingParams, prompt: list[int] = PROMPT, **limits: Any) -> Any:
    engine = toy_engine(**limits)
    if limits.get("num_speculative_tokens"):
        always_speculate(engine)
    engine.add_request(prompt, params)
    engine.add_request([5, 6], GREEDY)  # another row without rules
    outputs = drain(engine)
    assert outputs["request-1"].outputs[0].token_ids == greedy([5, 6], 30, stop_at_eos=False)
    return outputs["request-0"].outputs[0]


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_only_allowed_tokens_are_drawn(num_speculative_tokens: int) -> None:
    allowed = [2, 31, 32, 63]
    params = replace(GREEDY, allowed_token_ids=allowed)
    output = run(params, num_speculative_tokens=num_speculative_tokens)
    assert output.token_ids == expected(PROMPT, 30, lambda output, token: token in allowed)
    sampled = run(replace(params, temperature=5.0, seed=3, n=2), num_speculative_tokens=num_speculative_tokens)
    assert set(sampled.token_ids) <= set(allowed)


def test_the_end_of_sequence_must_be_allowed_too() -> None:
    engine = toy_engine()
    for allowed in ([0], [0, 7]):
        engine.add_request(PROMPT, replace(GREEDY, ignore_eos=False, allowed_token_ids=allowed))
    outputs = drain(engine)
    assert outputs["request-0"].outputs[0].token_ids == [0]
    assert outputs["request-1"].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_bad_words_do_not_occur(num_speculative_tokens: int) -> None:
    letters = range(1, 9)
    free = expected(PROMPT, 30, lambda text, token: token in letters)
    pairs, single = set(pairwise(free)), free[0]
    words = [ToyTokenizer().decode(list(pair)) for pair in pairs] + [ToyTokenizer().decode([single])]
    params = replace(GREEDY, bad_words=words, allowed_token_ids=list(letters))
    output = run(params, num_speculative_tokens=num_speculative_tokens)

    def is_allowed(text: list[int], token: int) -> bool:
        return token in letters and token != single and (*text[-1:], token) not in pairs

    assert output.token_ids == expected(PROMPT, 30, is_allowed)


def test_a_word_of_three_tokens_needs_all_of_them() -> None:
    space = ToyTokenizer.pieces.index(b" ")
    # The prompt ends with "ab": only generated tokens count.
    params = replace(GREEDY, allowed_token_ids=[1, 2, 3, space], bad_words=["abc"])
    output = run(params, [9, 1, 2])

    def is_allowed(text: list[int], token: int) -> bool:
        return token in (1, 2, 3, space) and not (text[-2:] == [1, 2] and token == 3)

    assert output.token_ids == expected([9, 1, 2], 30, is_allowed)


def test_rules_and_a_grammar_hold_together() -> None:
    engine = toy_engine()
    request = constrained(engine, PROMPT, replace(GREEDY, bad_words=["b"]), Letters("abc", 9))
    text = drain(engine)[request].outputs[0].text
    assert len(text) == 9
    assert set(text) <= set("acx")


def test_nothing_is_allowed() -> None:
    engine = toy_engine()
    engine.add_request(PROMPT, replace(GREEDY, allowed_token_ids=[1], bad_words=["a"]))
    engine.add_request(PROMPT, GREEDY)
    outputs = drain(engine)
    assert outputs["request-0"].outputs[0].finish_reason == "error"
    assert "finite largest logit, got -inf" in outputs["request-0"].outputs[0].stop_reason
    assert outputs["request-1"].outputs[0].token_ids == greedy(PROMPT, 30, stop_at_eos=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids must be an integer"),
        ({"allowed_token_ids": {1: 2}}, "allowed_token_ids must be a list of token ids"),
        ({"bad_words": [""]}, "bad_words must be a non-empty string or a list of them"),
        ({"bad_words": 7}, "bad_words must be a non-empty string or a list of them"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be True or False"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be an integer"),
    ],
)
def test_malformed_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_list_that_is_too_long_is_refused_unread() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("read")

    with pytest.raises(RequestError, match=r"^allowed_token_ids must be at most 131072, got 131073$"):
        SamplingParams(allowed_token_ids=Unread([1] * (MAX_ALLOWED_TOKEN_IDS + 1)))
    SamplingParams(allowed_token_ids=[1] * MAX_ALLOWED_TOKEN_IDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, r"allowed_token_ids must be an integer in 0\.\.63, got 64"),
        ({"bad_words": ["a", "b", "c"]}, "bad_words must have at most max_bad_words=2 words, got 3"),
        ({"bad_words": ["a" * 9]}, r"bad_words\[0\] must have at most max_stop_string_length=8 characters, got 9"),
    ],
)
def test_parameters_that_do_not_fit_the_engine(fields: dict[str, Any], message: str) -> None:
    engine = toy_engine(max_bad_words=2, max_stop_string_length=8)
    with pytest.raises(RequestError, match=message):
        engine.add_request(PROMPT, SamplingParams(**fields))


@pytest.mark.parametrize("includes", [False, True])
def test_the_stop_string_may_be_part_of_the_text(includes: bool) -> None:
    free = run(GREEDY).text
    for begin in range(len(free) - 3):
        stop = free[begin : begin + 3]
        output = run(replace(GREEDY, stop=[stop], include_stop_str_in_output=includes))
        end = free.index(stop) + 3 * includes
        assert (output.text, output.stop_reason) == (free[:end], stop)


@pytest.mark.parametrize("includes", [False, True])
def test_the_text_of_a_stop_token(includes: bool) -> None:
    free = run(GREEDY)
    stop = free.token_ids[7]
    output = run(replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=includes))
    count = free.token_ids.index(stop) + includes
    assert output.text == ToyTokenizer().decode(free.token_ids[:count])
    assert output.stop_reason == stop


def test_a_stop_token_that_completes_a_stop_string() -> None:
    free = run(GREEDY)
    tokens = free.token_ids
    stop = ToyTokenizer().decode(tokens[6:8])
    params = replace(GREEDY, stop_token_ids=[tokens[7]], stop=[stop], include_stop_str_in_output=True)
    assert tokens.index(tokens[7]) == 7
    output = run(params)
    assert (output.text, output.stop_reason) == (ToyTokenizer().decode(tokens[:8]), stop)


@pytest.mark.parametrize(("limit", "kept"), [(4, 4), (200, 94), (-1, 95)])
def test_the_end_of_a_long_prompt_is_kept(limit: int, kept: int) -> None:
    prompt = [(3 * i) % 60 + 1 for i in range(94 if limit == 200 else 300)]
    engine = toy_engine()
    params = replace(GREEDY, truncate_prompt_tokens=limit, max_tokens=1)
    for given in (prompt, engine.validate(prompt, params)):
        request = engine.add_request(given, params)
        output = drain(engine)[request]
        assert output.prompt_token_ids == prompt[-kept:]
        assert output.outputs[0].token_ids == greedy(prompt[-kept:], 1)
