"""Every sampling parameter, end to end on the toy model, against a plain reference of the same draw."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.toy import (
    EOS_ID,
    VOCAB_SIZE,
    ToyModel,
    ToyTokenizer,
    always_speculate,
    drain,
    greedy,
    hashes_of,
    logits_of,
    toy_engine,
)
from support.toy_grammar import Letters, constrained
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch_inputs import BatchInputs, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.engine import Engine
from fastinfer.engine.logits_row import LogitsRow, drop_impossible_drafts, logits_rows
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.errors import QueueFullError, RequestError
from fastinfer.sampling_params import SamplingParams

PROMPT = [5, 9, 5, 30, 2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)


def complete(params: SamplingParams, prompt: list[int] = PROMPT, **limits: Any) -> Any:
    """The request's output, among neighbours that ask for something else."""
    engine = toy_engine(**limits)
    engine.add_request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=40, presence_penalty=1.0, seed=1))
    engine.add_request([4], GREEDY)
    request_id = engine.add_request(prompt, params)
    return drain(engine)[request_id]


def reference(params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """Token by token, each row of logits edited here and drawn alone."""
    tokens: list[int] = []
    while len(tokens) < (params.max_tokens or 0):
        logits = logits_of([*prompt, *tokens])
        for token in {*prompt, *tokens}:
            penalty = params.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(tokens):
            logits[token] -= params.presence_penalty + params.frequency_penalty * tokens.count(token)
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        if len(tokens) < params.min_tokens:
            logits[[EOS_ID, *(params.stop_token_ids or ())]] = -torch.inf
        drawn = ops.sample(
            logits[None],
            temperature=torch.tensor([float(params.temperature)]),
            top_k=torch.tensor([max(params.top_k, 0)], dtype=torch.int32),
            top_p=torch.tensor([float(params.top_p)]),
            min_p=torch.tensor([float(params.min_p)]),
            seeds=torch.tensor([params.seed or 0]),
            positions=torch.tensor([len(prompt) + len(tokens)]),
        )
        tokens.append(int(drawn.tokens))
        if tokens[-1] in (params.stop_token_ids or ()) or (tokens[-1] == EOS_ID and not params.ignore_eos):
            break
    return tokens


SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=4)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        replace(GREEDY, repetition_penalty=1.5),
        replace(GREEDY, repetition_penalty=0.5),
        replace(GREEDY, presence_penalty=1.5),
        replace(GREEDY, presence_penalty=-2.0),
        replace(GREEDY, frequency_penalty=0.7),
        replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4),
        replace(GREEDY, logit_bias={7: 1.5, 8: -100, 9: 100}),
        replace(SAMPLED, logit_bias=dict.fromkeys(range(40), -100.0)),
        replace(SAMPLED, logit_bias={7: 2.0}, frequency_penalty=1.0, min_tokens=9, ignore_eos=False),
        replace(SAMPLED, temperature=2.0, min_tokens=10, ignore_eos=False),
        replace(SAMPLED, temperature=2.0, min_tokens=12, stop_token_ids=[1, 2, 3, 4, 5, 6, 7, 8], ignore_eos=False),
        replace(SAMPLED, temperature=3.0, top_k=5, min_p=0.05),
        replace(SAMPLED, top_k=-1),
    ],
)
def test_each_parameter(params: SamplingParams) -> None:
    expected = reference(params)
    for limits in ({}, {"block_size": 2, "max_num_batched_tokens": 3}, {"num_speculative_tokens": 3}):
        assert complete(params, **limits).outputs[0].token_ids == expected
    assert len(expected) >= max(params.min_tokens, 1)


def test_penalties_survive_a_preemption() -> None:
    params = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.4, max_tokens=30)
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 17)] for i in range(6)]
    engine = toy_engine(block_size=2, num_kv_blocks=24, max_model_len=48, enable_prefix_caching=False)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id].outputs[0].token_ids == reference(params, prompt)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_completions_are_those_of_n_seeds(n: int) -> None:
    output = complete(replace(SAMPLED, n=n, temperature=1.5), block_size=3)
    assert [completion.index for completion in output.outputs] == list(range(n))
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == reference(replace(SAMPLED, temperature=1.5, seed=4 + index))
        assert completion.text == ToyTokenizer().decode(completion.token_ids)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == n


def test_each_completion_is_penalised_for_its_own_tokens() -> None:
    params = replace(SAMPLED, n=3, temperature=1.5, frequency_penalty=1.5, presence_penalty=1.0)
    for index, completion in enumerate(complete(params).outputs):
        assert completion.token_ids == reference(replace(params, seed=4 + index))


def test_n_computes_the_prompt_once() -> None:
    engine = toy_engine(block_size=4)
    engine.add_request(list(range(1, 30)), replace(SAMPLED, n=5, max_tokens=7))
    drain(engine)
    assert sum(engine.model.batch_sizes) == 29 + 5 * 6


def test_completions_that_end_at_different_times() -> None:
    params = replace(SAMPLED, temperature=2.0, n=6, ignore_eos=False, max_tokens=60)
    engine = toy_engine()
    engine.add_request(PROMPT, params)
    sizes, deltas = [], [""] * 6
    while engine.has_unfinished:
        for output in engine.step():
            for completion in output.outputs:
                deltas[completion.index] += completion.delta
            sizes.append(sum(completion.finish_reason is None for completion in output.outputs))
            assert output.finished == (sizes[-1] == 0)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    assert deltas == [completion.text for completion in output.outputs]
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == reference(replace(params, seed=4 + index))


def test_the_last_seed_has_a_successor() -> None:
    assert len(complete(replace(SAMPLED, n=2, seed=2**63 - 1)).outputs) == 2


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_prompt_logprobs(count: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastinfer.engine.worker.PROMPT_LOGPROBS_ROWS", 5)
    engine = toy_engine(max_num_batched_tokens=budget, block_size=2, num_kv_blocks=30, max_model_len=30)
    prompt = [(3 * j + 1) % VOCAB_SIZE for j in range(17)]
    for _ in range(2):
        request_id = engine.add_request(prompt, replace(GREEDY, prompt_logprobs=count, max_tokens=6, logprobs=1, n=2))
        for company in range(4):
            engine.add_request([company], replace(GREEDY, max_tokens=20))
        output = drain(engine)[request_id]
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entries in enumerate(output.prompt_logprobs):
            if position:
                expected = logits_of(prompt[:position]).log_softmax(-1)
                order = expected.argsort(descending=True).tolist()
                assert set(entries) == {prompt[position], *order[:count]}
                for token, entry in entries.items():
                    assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-5)
                    assert entry.rank == order.index(token) + 1
        completion = output.outputs[0]
        total = sum(
            entries[token].logprob for entries, token in zip(completion.logprobs, completion.token_ids, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_of_what_the_prefix_cache_has() -> None:
    engine = toy_engine(block_size=2)
    engine.add_request(PROMPT, GREEDY)
    drain(engine)
    request_id = engine.add_request(PROMPT, replace(GREEDY, prompt_logprobs=1))
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(PROMPT)
    request_id = engine.add_request(PROMPT, GREEDY)
    assert drain(engine)[request_id].num_cached_tokens == 4


def test_no_prompt_logprobs_unless_asked_for() -> None:
    assert complete(GREEDY).prompt_logprobs is None
    assert complete(GREEDY).outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_grammar(speculate: int, logprobs: int | None) -> None:
    texts, steps = [], []
    engine = toy_engine(num_speculative_tokens=speculate)
    if speculate:
        engine.speculator._choose = lambda sequences, available: available  # type: ignore[union-attr,method-assign]
    for seed in range(20):
        params = replace(SAMPLED, max_tokens=50, seed=2 * seed, n=2, logprobs=logprobs, temperature=1.0)
        request_id = constrained(engine, PROMPT, params, Letters("abc", 11))
        count = 0
        while engine.has_unfinished:
            outputs = engine.step()
            count += 1
        steps.append(count)
        assert outputs[0].request_id == request_id
        for completion in outputs[0].outputs:
            assert completion.finish_reason == "stop"
            texts.append(completion.text)
    assert all(len(text) == 11 and set(text) <= set("abcx") and text[3::4] == "xx" for text in texts)
    assert len(set(texts)) > 30
    if not speculate:
        assert set(steps) == {11 if logprobs else 9}  # forced letters take no step, unless their logprobs are wanted
    elif not logprobs:
        assert engine.stats().num_accepted_tokens > 0
        plain = toy_engine()
        for seed in range(20):
            params = replace(SAMPLED, max_tokens=50, seed=2 * seed, n=2, temperature=1.0)
            request_id = constrained(plain, PROMPT, params, Letters("abc", 11))
            assert [c.text for c in drain(plain)[request_id].outputs] == texts[2 * seed : 2 * seed + 2]


class Pairs(Letters):
    """After a letter the one after it must come, as a token of two: tokens of one letter would be allowed too."""

    def _allowed(self) -> str:
        return "" if self.finished else "acegikmoqsuw" if len(self.text) % 3 == 0 else chr(ord(self.text[-1]) + 1)

    def accept(self, token_id: int) -> None:
        for letter in ToyTokenizer.pieces[token_id].decode():
            if letter not in self._allowed():
                raise RequestError(f"{letter!r} is not allowed")
            self.text += letter

    def forced_tokens(self) -> list[int]:
        if self.finished or len(self.text) % 3 != 1:
            return []
        following = ord(self.text[-1]) + 1
        return [ToyTokenizer.pieces.index(bytes([following, following + 1]))]

    def copy(self) -> "Pairs":
        return Pairs(self.letters, self.length, self.text)


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("max_tokens", [4, 50])
def test_logprobs_keep_the_tokens_that_a_grammar_forces(speculate: int, max_tokens: int) -> None:
    engine = toy_engine(num_speculative_tokens=speculate)
    if speculate:
        always_speculate(engine)
    for seed in range(4):
        params = replace(SAMPLED, max_tokens=max_tokens, seed=seed, temperature=2.0, min_tokens=3, stop_token_ids=[40])
        plain = constrained(engine, PROMPT, params, Pairs("", 12))
        detailed = constrained(engine, PROMPT, replace(params, logprobs=3), Pairs("", 12))
        outputs = drain(engine)
        expected, completion = outputs[plain].outputs[0], outputs[detailed].outputs[0]
        assert completion.token_ids == expected.token_ids
        assert (completion.text, completion.finish_reason) == (expected.text, expected.finish_reason)
        assert len(completion.token_ids) > 3
        for index, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            logprobs = logits_of([*PROMPT, *completion.token_ids[:index]]).log_softmax(-1)
            assert entries[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-5)


def test_a_grammar_that_cannot_be_restored_ends_its_request_only() -> None:
    """After a step that failed, grammars return to the state before it."""

    class Stuck(Letters):
        def replay(self, tokens: list[int]) -> None:
            raise RequestError("stuck")

        def copy(self) -> "Stuck":
            return Stuck(self.letters, self.length, self.text)

    engine = toy_engine()
    params = replace(SAMPLED, max_tokens=50)
    good, bad = (constrained(engine, PROMPT, params, kind("abc", 9)) for kind in (Letters, Stuck))
    for _ in range(2):
        engine.step()
    engine.model.fail = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the model broke"):
        engine.step()
    engine.model.fail = False  # type: ignore[attr-defined]
    outputs = drain(engine)
    assert (outputs[good].outputs[0].finish_reason, len(outputs[good].outputs[0].text)) == ("stop", 9)
    assert (outputs[bad].outputs[0].finish_reason, outputs[bad].outputs[0].stop_reason) == ("error", "stuck")


def test_a_grammar_that_fails_ends_its_request_only() -> None:
    engine = toy_engine()
    good = constrained(engine, PROMPT, replace(SAMPLED, max_tokens=50), Letters("abc", 9))
    bad = constrained(engine, PROMPT, replace(SAMPLED, max_tokens=50, n=3), Letters("abc", 4, "aaaaaa"))
    outputs = drain(engine)
    assert outputs[good].outputs[0].finish_reason == "stop"
    assert [c.finish_reason for c in outputs[bad].outputs] == ["error"] * 3
    assert outputs[bad].outputs[0].stop_reason == "too long"
    assert engine.block_manager.num_used == 0


def with_unsound_grammar(engine: Engine) -> str:
    """Queue a request whose grammar cannot be compiled."""
    request_id = engine.add_request(PROMPT, SAMPLED)
    request, compiled = engine.requests.active[request_id], Future[Any]()
    engine.scheduler.finish(request.sequences[0])
    request.sequences[0].state = SequenceState.PENDING
    engine.requests.awaiting_grammar.add(request, compiled)
    compiled.set_exception(RequestError("no such grammar"))
    return request_id


def test_a_failed_request_is_told_of_though_the_step_fails_too() -> None:
    engine = toy_engine()
    good = engine.add_request(PROMPT, GREEDY)
    bad = with_unsound_grammar(engine)
    engine.model.fail = True  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the model broke"):
            engine.step()
    with pytest.raises(RequestError, match="request_id must be new"):
        engine.add_request(PROMPT, SAMPLED, request_id=bad)
    engine.model.fail = False  # type: ignore[attr-defined]
    outputs = drain(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert outputs[good].outputs[0].token_ids == greedy(PROMPT, 25, stop_at_eos=False)


def test_grammars_that_are_compiled_in_the_background() -> None:
    """Each completion has its own copy, and one that comes too late is of no harm."""
    engine = toy_engine(max_num_waiting=2)
    ids, compiled = [], []
    for _ in range(2):
        ids.append(engine.add_request(PROMPT, replace(SAMPLED, n=2, temperature=1.0)))
        engine.scheduler.finish(engine.requests.active[ids[-1]].sequences[0])
        for sequence in engine.requests.active[ids[-1]].sequences:
            sequence.state = SequenceState.PENDING
        compiled.append(Future())
        engine.requests.awaiting_grammar.add(engine.requests.active[ids[-1]], compiled[-1])
    assert engine.step() == []
    with pytest.raises(QueueFullError):
        engine.add_request(PROMPT)
    assert engine.abort(ids[0]) is not None
    for future in compiled:
        future.set_result(Letters("abc", 9))
    outputs = drain(engine)
    assert outputs.keys() == {ids[1]}
    texts = [completion.text for completion in outputs[ids[1]].outputs]
    assert {len(text) for text in texts} == {9}
    assert texts[0] != texts[1]


def test_abort_of_a_failed_request_that_nobody_was_told_of() -> None:
    engine = toy_engine()
    engine.add_request(PROMPT, GREEDY, request_id="good")
    bad = with_unsound_grammar(engine)
    engine.model.fail = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the model broke"):
        engine.step()
    for request_id, reason in ((bad, "error"), ("good", "abort")):
        output = engine.abort(request_id)
        assert output is not None
        assert output.outputs[0].finish_reason == reason
        assert engine.abort(request_id) is None
    assert not engine.has_unfinished
    assert engine.step() == []


def test_drafts_that_the_grammar_allows() -> None:
    sequence = Sequence("r", PROMPT, GREEDY, seed=0)
    sequence.num_computed_tokens = len(PROMPT) - 1

    def drafts_and_rows(length: int, drafts: list[int]) -> tuple[list[int], int]:
        sequence.grammar = Letters("abc", length)  # type: ignore[assignment]
        chunk = Chunk(sequence, 1, drafts=drafts)
        drop_impossible_drafts(chunk)
        rows = logits_rows(chunk)
        assert sequence.grammar.text == ""
        return chunk.drafts, len(rows)

    assert drafts_and_rows(9, [1, 2]) == ([1, 2], 3)
    assert drafts_and_rows(9, [1, 4, 2]) == ([1], 2), "d is not allowed"
    assert drafts_and_rows(9, [1, 2, 3, 24]) == ([1, 2], 3), "after c there is no choice"
    assert drafts_and_rows(2, [1, 2, 3]) == ([1], 2), "b is the end"


def test_a_mask_that_fails_behind_a_draft_is_that_row_s_alone() -> None:
    class Brittle(Letters):
        def fill_mask(self, words: np.ndarray) -> None:
            if self.text == "ab":
                raise RequestError("ab is too much")
            super().fill_mask(words)

        def rollback(self, n: int) -> None:
            super().rollback(n)
            if n > 1:
                raise RequestError("that was too much")

    grammar: Any = Brittle("abc", 9)
    sequence = Sequence("r", PROMPT, GREEDY, seed=0)
    other: Any = Letters("xyz", 9)
    rows = [LogitsRow(sequence, [1, 2, 3][:count], grammar) for count in range(4)]
    rows.append(LogitsRow(sequence, [], other))
    inputs = BatchInputs(1, 1, len(rows), max_blocks=1, block_size=1)
    inputs.sampling.write(rows)
    result = StepResult(torch.empty(0), torch.zeros(len(rows), VOCAB_SIZE), inputs.sampling)
    drawn = Sampler(9, VOCAB_SIZE, frozenset()).draw(result, rows)
    assert [token.token_id for token in drawn] == [1, 1, -1, -1, 24], "a, a, two errors, and x"
    assert [str(token.error) for token in drawn[2:4]] == ["ab is too much", "that was too much"]
    assert (grammar.text, other.text) == ("", "")


class Poisoned(ToyModel):
    """After [9, 9] come no numbers."""

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden, indices, adapter_ids)
        logits[hidden[indices, 0] == hashes_of([9, 9])[-1]] = torch.nan
        return logits


@pytest.mark.parametrize("why", ["nothing is allowed", "no numbers"])
@pytest.mark.parametrize("speculation", ["none", "ngram", "a draft model"])
def test_a_draw_that_fails_ends_its_request_only(why: str, speculation: str) -> None:
    num_drafts = 0 if speculation == "none" else 3
    engine = toy_engine(Poisoned() if speculation == "a draft model" else None, num_speculative_tokens=num_drafts)
    if num_drafts:
        always_speculate(engine)
    good = [engine.add_request(PROMPT, replace(SAMPLED, n=2)) for _ in range(2)]
    if why == "no numbers":
        engine.worker.runner.model = Poisoned()
        bad = engine.add_request([9], replace(GREEDY, logit_bias={9: 100.0}, n=2))
    else:
        bad = engine.add_request([9], replace(GREEDY, min_tokens=9, stop_token_ids=list(range(VOCAB_SIZE)), n=2))
    outputs = drain(engine, 100)
    for completion in outputs[bad].outputs:
        assert completion.finish_reason == "error"
        assert completion.stop_reason.startswith("RuntimeError: sample: ")
    for request_id in good:
        texts = [completion.token_ids for completion in outputs[request_id].outputs]
        assert texts == [reference(SAMPLED), reference(replace(SAMPLED, seed=5))]
    assert engine.block_manager.num_used == 0


def test_max_tokens_cuts_a_grammar() -> None:
    engine = toy_engine()
    for max_tokens in range(1, 9):
        request_id = constrained(engine, PROMPT, replace(SAMPLED, max_tokens=max_tokens), Letters("abc", 9))
        completion = drain(engine)[request_id].outputs[0]
        assert (len(completion.token_ids), completion.finish_reason) == (max_tokens, "length")


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    engine = toy_engine(max_num_seqs=4)
    for field, value in (("logit_bias", {64: 1.0}), ("stop_token_ids", [64])):
        with pytest.raises(RequestError, match=rf"^{field} must be an integer in 0..63, got 64$"):
            engine.add_request([1], replace(GREEDY, **{field: value}))
    with pytest.raises(RequestError, match=r"^n must be an integer in 1..4, got 5$"):
        engine.add_request([1], replace(GREEDY, n=5))
    assert not engine.has_unfinished


def test_greedy_reference_is_the_toys() -> None:
    assert reference(GREEDY) == greedy(PROMPT, 25, stop_at_eos=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", "b", "c", "d"]}, "stop must have at most max_stop_strings=3 strings, got 4"),
        ({"stop": ["a", "b" * 6]}, r"stop\[1\] must have at most max_stop_string_length=5 characters, got 6"),
        ({"stop": "b" * 6}, r"stop\[0\] must have at most max_stop_string_length=5 characters, got 6"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids must have at most max_stop_token_ids=2 token ids, got 3"),
        ({"logit_bias": {1: 1.0, 2: 0.0}}, "logit_bias must have at most max_logit_bias=1 token ids, got 2"),
    ],
)
def test_limits_name_the_field_and_the_limit(fields: dict[str, Any], message: str) -> None:
    engine = toy_engine(max_stop_strings=3, max_stop_string_length=5, max_stop_token_ids=2, max_logit_bias=1)
    with pytest.raises(RequestError, match=f"^{message}$"):
        engine.add_request([1], SamplingParams(**fields))
    with pytest.raises(RequestError, match=f"^{message}$"):
        engine.validate([1], SamplingParams(**fields))
    assert not engine.has_unfinished
    engine.add_request([1], SamplingParams(stop=["a", "b" * 5, "c"], stop_token_ids=[1, 2], logit_bias={1: 1.0}))
    toy_engine().add_request([1], SamplingParams(**fields))  # within the limits by default


@pytest.mark.parametrize("name", ["max_stop_strings", "max_stop_string_length", "max_stop_token_ids", "max_logit_bias"])
def test_limits_are_numbers(name: str) -> None:
    for value in (-1, 1.0, None, True, 2**31):
        with pytest.raises(RequestError, match=f"^{name} must be an integer in 0..2147483647, got {value}$"):
            toy_engine(**{name: value})
