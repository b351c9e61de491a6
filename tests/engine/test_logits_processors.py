"""Functions of the user that change the logits: what they get, when they are called, and whom their errors end."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiny_decoder import CONFIG, make_decoder
from support.toy import (
    VOCAB_SIZE,
    Forgetful,
    ToyModel,
    ToyTokenizer,
    always_speculate,
    check_blocks,
    drain,
    logits_of,
    toy_engine,
)
from support.toy_grammar import Letters, constrained
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

PROMPT = [9, 4, 17, 2, 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


def drain_one(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> Any:
    request_id = engine.add_request(prompt, params)
    output = drain(engine)[request_id]
    check_blocks(engine)
    return output


def forbid_half(logits: Tensor, length: int) -> None:
    first = VOCAB_SIZE // 2 * (length % 2)
    logits[first : first + VOCAB_SIZE // 2] -= 1000.0


class Recorder:
    """Keeps what it was called with, and allows one half of the vocabulary, then the other."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], Tensor]] = []

    def __call__(self, output: Any, logits: Tensor) -> None:
        self.calls.append((list(output), logits.clone()))
        forbid_half(logits, len(output))


def reference(length: int) -> list[int]:
    """What the recorder's greedy text must be."""
    output: list[int] = []
    for _ in range(length):
        logits = logits_of(PROMPT + output).clone()
        forbid_half(logits, len(output))
        output.append(int(logits.argmax()))
    return output


def test_they_get_the_output_and_the_model_s_logits() -> None:
    recorder = Recorder()
    tokens = drain_one(toy_engine(), replace(GREEDY, logits_processors=[recorder])).outputs[0].token_ids
    assert tokens == reference(8)
    assert tokens != drain_one(toy_engine(), GREEDY).outputs[0].token_ids
    assert [output for output, _ in recorder.calls] == [tokens[:length] for length in range(8)]
    for output, logits in recorder.calls:
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, logits_of(PROMPT + output))


def test_the_output_is_a_read_only_sequence() -> None:
    seen: list[Any] = []

    def look(output: Any, logits: Tensor) -> None:
        seen.append((len(output), output[-1:], output[:2], output[::-1], list(output), 3 in output))
        if output:
            assert output[-1] == output[len(output) - 1] == list(output)[-1]
        for index in (len(output), -len(output) - 1):
            with pytest.raises(IndexError):
                output[index]
        with pytest.raises(TypeError):
            output[0] = 1

    tokens = drain_one(toy_engine(), replace(GREEDY, logits_processors=[look])).outputs[0].token_ids
    for length, (count, last, two, reverse, every, has) in enumerate(seen):
        start = tokens[:length]
        assert (count, last, two, reverse, every, has) == (
            length,
            start[-1:],
            start[:2],
            start[::-1],
            start,
            3 in start,
        )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_change_the_logits_in_place_or_return_new_ones(in_place: bool, dtype: torch.dtype) -> None:
    def only_next_letter(output: Any, logits: Tensor) -> Tensor | None:
        changed = torch.full_like(logits, -torch.inf)
        changed[1 + len(output)] = 0.0
        if not in_place:
            return changed.to(dtype)
        logits.copy_(changed)
        return None

    assert drain_one(toy_engine(), replace(SAMPLED, logits_processors=[only_next_letter])).outputs[0].token_ids == [
        *range(1, 13)
    ]


def test_they_are_called_in_order() -> None:
    def force(token_id: int) -> Any:
        def processor(output: Any, logits: Tensor) -> None:
            logits[token_id] = logits.max() + 1

        return processor

    params = replace(GREEDY, logits_processors=(force(5), force(7)), max_tokens=3)
    assert drain_one(toy_engine(), params).outputs[0].token_ids == [7, 7, 7]


def zero(output: Any, logits: Tensor) -> None:
    logits.zero_()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {7: 1.0}}, [7, 7, 7]),
        ({"presence_penalty": 1.0, "logit_bias": {7: 1.5, 8: 1.0, 9: 0.7}}, [7, 8, 9]),
        ({"allowed_token_ids": [11, 12], "logit_bias": {7: 1.0, 12: 0.5}}, [12, 12, 12]),
        ({"bad_words": ["f"], "logit_bias": {6: 2.0, 5: 1.0}}, [5, 5, 5]),
    ],
    ids=str,
)
def test_everything_else_comes_after_them(fields: dict[str, Any], expected: list[int]) -> None:
    params = replace(GREEDY, logits_processors=[zero], max_tokens=3, **fields)
    assert drain_one(toy_engine(), params).outputs[0].token_ids == expected


def test_a_grammar_has_the_last_word() -> None:
    def push(output: Any, logits: Tensor) -> None:
        logits[20] += 100

    engine = toy_engine()
    request_id = constrained(
        engine, PROMPT, replace(GREEDY, logits_processors=[push], ignore_eos=False), Letters("abc", 5)
    )
    text = drain(engine)[request_id].outputs[0].text
    assert text
    assert set(text) <= set("abcx")


@pytest.mark.parametrize("drafts", [None, "ngram", "draft model"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, n=3)], ids=["greedy", "sampled", "n"])
def test_the_text_is_the_same_with_drafts_ahead_and_in_company(
    params: SamplingParams, async_scheduling: bool, drafts: str | None
) -> None:
    params = replace(params, logits_processors=[Recorder()])
    expected = [c.token_ids for c in drain_one(toy_engine(), params).outputs]
    engine = toy_engine(
        Forgetful() if drafts == "draft model" else None,
        num_speculative_tokens=3 if drafts else 0,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=64,
    )
    if drafts:
        always_speculate(engine)
    others = [engine.add_request(PROMPT[:length], SAMPLED) for length in (1, 3)]
    request_id = engine.add_request(PROMPT, params)
    outputs = drain(engine)
    check_blocks(engine)
    assert [c.token_ids for c in outputs[request_id].outputs] == expected
    for other, length in zip(others, (1, 3), strict=True):
        alone = drain_one(toy_engine(), SAMPLED, PROMPT[:length]).outputs[0].token_ids
        assert outputs[other].outputs[0].token_ids == alone
    if drafts == "draft model":
        assert engine.stats().num_accepted_tokens > 0


def test_each_completion_has_its_own_output() -> None:
    recorder = Recorder()
    outputs = drain_one(toy_engine(), replace(SAMPLED, n=3, logits_processors=[recorder])).outputs
    assert len({tuple(c.token_ids) for c in outputs}) == 3
    expected = sorted(c.token_ids[:length] for c in outputs for length in range(12))
    assert sorted(output for output, _ in recorder.calls) == expected


def test_a_step_waits_for_them() -> None:
    """The next step would be launched before the function has seen the last token."""
    engine = toy_engine(async_scheduling=True)
    engine.add_request(PROMPT, replace(SAMPLED, logits_processors=[zero]))
    engine.step()
    [request] = engine.requests.active.values()
    assert not request.sequences[0].may_run_ahead
    assert request.sequences[0].num_unknown_tokens == 0
    drain(engine)


def test_log_probabilities_are_the_model_s() -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    plain = drain_one(toy_engine(), params)
    forced = plain.outputs[0].token_ids

    def force(output: Any, logits: Tensor) -> None:
        token_id = forced[len(output)]
        logits.zero_()
        logits[token_id] = 5.0

    engine = toy_engine()
    other = engine.add_request(PROMPT, params)
    request_id = engine.add_request(PROMPT, replace(params, logits_processors=[force]))
    outputs = drain(engine)
    for output in (outputs[other], outputs[request_id]):
        assert output.outputs[0].token_ids == forced
        for got, expected in zip(output.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True):
            assert {i: e.rank for i, e in got.items()} == {i: e.rank for i, e in expected.items()}
            assert {i: e.logprob for i, e in got.items()} == pytest.approx({i: e.logprob for i, e in expected.items()})


def fails(output: Any, logits: Tensor) -> None:
    logits.fill_(torch.nan)
    if len(output) == 2:
        raise KeyError("no such word")
    logits.zero_()


BAD: dict[str, tuple[Any, str]] = {
    "raises": (fails, "no such word"),
    "returns text": (lambda output, logits: "text", r"must return a float tensor \[\d+\] or None, got str"),
    "returns integers": (lambda output, logits: logits.long(), "got torch.int64"),
    "returns another shape": (lambda output, logits: logits[:5], r"got torch.float32 \[5\]"),
    "returns NaN": (lambda output, logits: logits.fill_(torch.nan), "NaN"),
    "forbids all": (lambda output, logits: logits.fill_(-torch.inf), "finite"),
    "takes one argument": (lambda output: None, "argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_ends_its_request_alone(case: str) -> None:
    processor, named = BAD[case]
    engine = toy_engine()
    before = engine.add_request(PROMPT, SAMPLED)
    bad = engine.add_request(PROMPT, replace(GREEDY, logits_processors=[processor], n=2))
    after = engine.add_request(PROMPT, replace(SAMPLED, logits_processors=[lambda output, logits: None]))
    outputs = drain(engine)
    check_blocks(engine)
    expected = drain_one(toy_engine(), SAMPLED).outputs[0].token_ids
    assert outputs[before].outputs[0].token_ids == outputs[after].outputs[0].token_ids == expected
    for completion in outputs[bad].outputs:
        assert completion.finish_reason == "error"
        assert len(completion.token_ids) == (2 if case == "raises" else 0)
    assert re.search(named, str(outputs[bad].outputs[0].stop_reason)), outputs[bad].outputs[0].stop_reason


@pytest.mark.parametrize("ends_before", [False, True])
def test_an_error_comes_after_the_same_tokens_with_drafts(ends_before: bool) -> None:
    """Several tokens are drawn at once then, also those after the end of the text."""

    def fail(output: Any, logits: Tensor) -> None:
        if len(output) == 4:
            raise ValueError("no")

    for length in range(1, len(PROMPT) + 1):
        prompt = PROMPT[:length]
        params = replace(GREEDY, logits_processors=[fail])
        if ends_before:
            params = replace(params, stop_token_ids=[drain_one(toy_engine(), GREEDY, prompt).outputs[0].token_ids[3]])
        [expected] = drain_one(toy_engine(), params, prompt).outputs
        assert expected.finish_reason == ("stop" if ends_before else "error")
        engine = always_speculate(toy_engine(ToyModel(), num_speculative_tokens=5))  # all drafts are right
        [completion] = drain_one(engine, params, prompt).outputs
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason


def test_recorded_steps_keep_their_logits() -> None:
    config = EngineConfig(kv_cache_dtype=torch.float32)
    engine = Engine(make_decoder(replace(CONFIG, vocab_size=VOCAB_SIZE)), ToyTokenizer(), config)  # type: ignore[arg-type]
    expected = drain_one(engine, GREEDY).outputs[0].token_ids
    recorder = Recorder()
    requests = [engine.add_request(PROMPT, replace(GREEDY, logits_processors=p)) for p in ([recorder], None, [zero])]
    outputs = drain(engine)
    assert outputs[requests[1]].outputs[0].token_ids == expected
    assert outputs[requests[2]].outputs[0].token_ids == [0] * 8
    assert outputs[requests[0]].outputs[0].token_ids != expected
    assert drain_one(engine, GREEDY).outputs[0].token_ids == expected
    assert len(engine.worker.runner.graphs.recorded) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [3, "text", [3], lambda output, logits: None], ids=["3", "text", "list", "function"])
def test_what_is_no_list_of_functions(value: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors must be a list of functions"):
        SamplingParams(logits_processors=value)
    assert SamplingParams(logits_processors=[zero]) == SamplingParams(logits_processors=(zero,))
    assert SamplingParams(logits_processors=None) == SamplingParams()
    hash(SamplingParams(logits_processors=[zero]))
