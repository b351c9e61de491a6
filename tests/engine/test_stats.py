"""What an engine counts, on traces whose numbers are known."""

import logging
import time
from itertools import pairwise

import pytest
from support.toy import ToyModel, always_speculate, drain, greedy, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer import BeamSearchParams, SamplingParams
from fastinfer.engine.stats import StepStats, StepWork

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_steps_and_totals_count_every_token() -> None:
    engine = toy_engine(max_num_batched_tokens=8, block_size=4)
    steps: list[StepStats] = []
    engine.on_step = steps.append
    before = time.perf_counter()
    engine.add_request([1] * 10, GREEDY)
    engine.add_request([2] * 3, SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    engine.add_embedding_request([3] * 6)
    drain(engine)
    stats = engine.stats()
    assert stats.num_steps == len(steps)
    assert stats.num_prompt_tokens == sum(step.num_prompt_tokens for step in steps) == 10 + 3 + 6
    assert stats.num_generated_tokens == sum(step.num_generated_tokens for step in steps) == 12 + 2 * 5
    # Every token but the last of each text is computed; the two completions share the prompt's.
    assert sum(step.num_tokens for step in steps) == 10 + 3 + 6 + 11 + 2 * 4
    assert all(step.num_tokens <= 8 for step in steps)
    assert {step.num_seqs for step in steps} <= {1, 2, 3, 4}
    for step, following in pairwise(steps):
        assert before <= step.start_time < step.start_time + step.seconds <= following.start_time


def test_work_counts_what_tokens_attend_to() -> None:
    engine = toy_engine(max_num_batched_tokens=8, block_size=4)
    steps: list[StepStats] = []
    engine.on_step = steps.append
    engine.add_request([1] * 10, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    drain(engine)
    prompt = [StepWork(1, 8, 8, 0, 0, 36), StepWork(1, 2, 2, 0, 0, 9 + 10)]  # 1 + ... + 8 pairs, then 9 + 10
    assert [step.work for step in steps] == [*prompt, StepWork(1, 1, 0, 1, 11, 0), StepWork(1, 1, 0, 1, 12, 0)]


def test_cached_prompts_and_drafts() -> None:
    engine = always_speculate(toy_engine(ToyModel(), block_size=4, num_speculative_tokens=3))
    engine.add_request([5, 6, 7] * 6, GREEDY)
    drain(engine)
    steps: list[StepStats] = []
    engine.on_step = steps.append
    engine.add_request([5, 6, 7] * 6, GREEDY)
    assert drain(engine)["request-1"].outputs[0].token_ids == greedy([5, 6, 7] * 6, 12, stop_at_eos=False)
    assert [step.num_prompt_tokens for step in steps] == [2] + [0] * (len(steps) - 1)  # 16 tokens were cached
    assert sum(step.num_generated_tokens for step in steps) == 12
    drafts = engine.stats().num_drafted_tokens
    assert drafts > 0
    assert max(step.num_tokens for step in steps[1:]) > 1


def test_tokens_that_a_grammar_forces_are_generated() -> None:
    engine = toy_engine()
    request_id = constrained(engine, [8, 9], GREEDY, Letters("abc", 10))
    assert len(drain(engine)[request_id].outputs[0].token_ids) == engine.stats().num_generated_tokens == 10


def test_accepted_drafts_behind_the_end_of_a_text_are_not_generated() -> None:
    model, text = ToyModel(), greedy([5, 6, 7], 12, stop_at_eos=False)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[text[6]])
    engine = always_speculate(toy_engine(model, model, num_speculative_tokens=7))
    request_id = engine.add_request([5, 6, 7], params)
    assert drain(engine)[request_id].outputs[0].token_ids == text[:7]
    assert engine.stats().num_accepted_tokens == 7  # the second of two steps has two of them behind the end
    assert engine.stats().num_generated_tokens == 7


def test_each_beam_gets_a_token_in_each_round() -> None:
    engine = toy_engine(block_size=4)
    engine.add_beam_request([5, 6, 7], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    drain(engine)
    assert engine.stats().num_generated_tokens == 3 * 4


def test_an_observer_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine()

    def broken(stats: StepStats) -> None:
        raise ValueError("the observer broke")

    engine.on_step = broken
    engine.add_request([1], GREEDY)
    with caplog.at_level(logging.ERROR, "fastinfer"):
        assert drain(engine)["request-0"].outputs[0].token_ids == greedy([1], 12, stop_at_eos=False)
    assert caplog.records[0].exc_info is not None
    assert len(caplog.records) == engine.stats().num_steps == 12
