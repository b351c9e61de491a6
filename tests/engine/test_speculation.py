"""Speculation changes the number of steps and nothing else."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.toy import (
    VOCAB_SIZE,
    Forgetful,
    ToyModel,
    always_speculate,
    drain,
    greedy,
    hashes_of,
    logits_of,
    toy_engine,
)
from torch import Tensor

from fastinfer.engine.acceptance import Acceptance, StepCosts
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.draft_model import RETRY_STEPS, spread
from fastinfer.engine.engine import Engine
from fastinfer.engine.ngram_index import NgramIndex
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.speculation import NgramSpeculator
from fastinfer.errors import RequestError
from fastinfer.models.batch import Batch
from fastinfer.models.draft_chain import MISSING
from fastinfer.models.kv_cache import KVCache
from fastinfer.sampling_params import SamplingParams

PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(6)]
SAMPLED = SamplingParams(temperature=1.2, top_k=20, top_p=0.95, max_tokens=30, seed=3, ignore_eos=True)


class Repetitive(ToyModel):
    """The next token depends on the last one alone, so that the text soon repeats itself."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        return batch.token_ids[:, None]


def engines(**limits: Any) -> dict[str, Engine]:
    return {
        "none": toy_engine(**limits),
        "ngram": always_speculate(toy_engine(num_speculative_tokens=4, **limits)),
        "a draft model": always_speculate(toy_engine(draft_model=Forgetful(), num_speculative_tokens=4, **limits)),
        "itself": always_speculate(toy_engine(draft_model=ToyModel(), num_speculative_tokens=5, **limits)),
    }


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=30),
        SAMPLED,
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
        replace(SAMPLED, min_tokens=25, ignore_eos=False),
        replace(SAMPLED, logit_bias={5: 3.0, 9: -100.0}),
        replace(SAMPLED, n=3),
        replace(SAMPLED, logprobs=3),
        replace(SAMPLED, stop=["ab", "c", "ä"]),
        replace(SAMPLED, stop_token_ids=[3, 4, 5]),
    ],
)
def test_the_text_is_the_same_with_and_without(params: SamplingParams) -> None:
    found: dict[str, list[Any]] = {}
    for name, engine in engines(max_num_batched_tokens=11, max_num_seqs=6, block_size=3).items():
        ids = [engine.add_request(prompt, replace(params, seed=index)) for index, prompt in enumerate(PROMPTS)]
        outputs = drain(engine)
        found[name] = [
            [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in outputs[i].outputs] for i in ids
        ]
        if name != "none":
            assert found[name] == found["none"], name
    stats = engine.stats()
    if not params.has_penalties:
        assert stats.num_accepted_tokens > 20


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    engine = engines()["itself"]
    for sampled in (False, True):
        params = SAMPLED if sampled else SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        before = engine.stats()
        request_id = engine.add_request(PROMPTS[3], params)
        steps = 0
        while engine.has_unfinished:
            outputs = engine.step()
            steps += 1
        after = engine.stats()
        assert outputs[0].request_id == request_id
        assert len(outputs[0].outputs[0].token_ids) == 30
        drafted = after.num_drafted_tokens - before.num_drafted_tokens
        assert drafted == after.num_accepted_tokens - before.num_accepted_tokens == 30 - steps
        assert steps == 1 + 5  # the prompt's step gives one token, five with five drafts each six, the last one fewer


def test_a_draft_model_agrees_as_often_as_the_distributions_allow() -> None:
    """At least (1 - TV) / (1 + TV) of the drafts are right. Texts of three tokens have one draft, of the second."""
    engine = always_speculate(toy_engine(draft_model=Forgetful(), num_speculative_tokens=1))
    prompt, temperature, count = [5, 9], 2.0, 600
    for seed in range(count):
        engine.add_request(prompt, SamplingParams(temperature=temperature, max_tokens=3, seed=seed, ignore_eos=True))
    expected, variance = 0.0, 0.0
    for output in drain(engine).values():
        seeds = torch.tensor([[hashes_of([*prompt, output.outputs[0].token_ids[0]])[-1]]])
        models = (ToyModel(), Forgetful())
        p, q = ((model.logits(seeds, torch.tensor([0])) / temperature).softmax(1) for model in models)
        distance = (p - q).abs().sum().item() / 2
        bound = (1 - distance) / (1 + distance)
        expected, variance = expected + bound, variance + bound * (1 - bound)
    stats = engine.stats()
    assert stats.num_drafted_tokens == count
    assert stats.num_accepted_tokens > expected - 3 * variance**0.5


class Reduced(Forgetful):
    """A draft model that has logits for some of the tokens, in an order of its own."""

    def __init__(self, count: int = 40) -> None:
        super().__init__()
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
        self.draft_tokens = order[:count]

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        assert self.draft_tokens is not None
        return super().logits(hidden, indices, adapter_ids)[:, self.draft_tokens]


def test_a_reduced_vocabulary_agrees_as_often_as_the_distributions_allow() -> None:
    """The noise of a draft is that of its token, not of its place in the draft model's logits."""
    draft = Reduced()
    assert draft.draft_tokens is not None
    engine = always_speculate(toy_engine(draft_model=draft, num_speculative_tokens=1))
    prompt, temperature, count = [5, 9], 2.0, 600
    for seed in range(count):
        engine.add_request(prompt, SamplingParams(temperature=temperature, max_tokens=3, seed=seed, ignore_eos=True))
    expected, variance = 0.0, 0.0
    for output in drain(engine).values():
        seeds = torch.tensor([[hashes_of([*prompt, output.outputs[0].token_ids[0]])[-1]]])
        p = (ToyModel().logits(seeds, torch.tensor([0])) / temperature).softmax(1)
        q = torch.zeros_like(p)
        q[:, draft.draft_tokens] = (draft.logits(seeds, torch.tensor([0])) / temperature).softmax(1)
        distance = (p - q).abs().sum().item() / 2
        bound = (1 - distance) / (1 + distance)
        expected, variance = expected + bound, variance + bound * (1 - bound)
    stats = engine.stats()
    assert stats.num_drafted_tokens == count
    assert stats.num_accepted_tokens > expected - 3 * variance**0.5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=30),
        SAMPLED,
        replace(SAMPLED, temperature=100.0, top_k=0, top_p=1.0),
        replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
        replace(SAMPLED, min_p=0.1, logit_bias={5: 100.0, 9: -100.0}),
    ],
)
def test_a_reduced_vocabulary_changes_no_text(params: SamplingParams) -> None:
    found = []
    for draft in (None, Reduced(), Reduced(1)):
        engine = toy_engine(draft_model=draft, num_speculative_tokens=3 if draft else 0, block_size=3)
        if draft:
            always_speculate(engine)
        ids = [engine.add_request(prompt, replace(params, seed=index)) for index, prompt in enumerate(PROMPTS)]
        outputs = drain(engine)
        found.append([outputs[i].outputs[0].token_ids for i in ids])
    assert found == [found[0]] * 3


def test_where_nothing_of_a_reduced_vocabulary_is_allowed() -> None:
    """Drafts are then some of what is allowed, and no draw fails."""
    draft = Reduced()
    assert draft.draft_tokens is not None
    allowed = sorted(set(range(1, VOCAB_SIZE)) - set(draft.draft_tokens.tolist()))[:5]
    params = replace(SAMPLED, allowed_token_ids=allowed)
    engine = always_speculate(toy_engine(draft_model=draft, num_speculative_tokens=3))
    request_id, alone = engine.add_request(PROMPTS[2], params), toy_engine()
    tokens = drain(engine)[request_id].outputs[0].token_ids
    other = alone.add_request(PROMPTS[2], params)
    assert tokens == drain(alone)[other].outputs[0].token_ids
    stats = engine.stats()
    assert stats.num_drafted_tokens > 20
    assert stats.num_failed_draws == 0


def test_a_reduced_vocabulary_is_for_draft_models() -> None:
    with pytest.raises(RequestError, match="must have logits for all 64 tokens, got a draft model with logits for 40"):
        toy_engine(model=Reduced())


def test_spread() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).bfloat16()
    found = spread(logits, torch.tensor([4, 0, 2]), 6)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2.0, MISSING, 3.0, MISSING, 1.0, MISSING], [5.0, MISSING, 6.0, MISSING, 4.0, MISSING]]


def test_drafts_from_the_text_itself_save_steps() -> None:
    def run(num_speculative_tokens: int) -> tuple[list[int], int]:
        engine = toy_engine(num_speculative_tokens=num_speculative_tokens)
        engine.worker.runner.model = Repetitive()
        if num_speculative_tokens:
            always_speculate(engine)
        engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        steps = 0
        while engine.has_unfinished:
            outputs = engine.step()
            steps += 1
        return outputs[0].outputs[0].token_ids, steps

    plain, speculated = run(0), run(4)
    assert plain[0] == speculated[0]
    assert plain[1] == 60
    assert speculated[1] < 40


@pytest.mark.parametrize("method", ["ngram", "a draft model"])
def test_the_distribution_is_kept(method: str) -> None:
    """Chi-square of texts of three tokens, drawn with different seeds, against the model's own probabilities. Only two
    tokens are likely, and the prompt has all their pairs, so that n-grams are found."""
    draft_model = Forgetful() if method == "a draft model" else None
    engine = always_speculate(toy_engine(draft_model=draft_model, num_speculative_tokens=3))
    prompt, count, bias = [1, 1, 2, 2, 1], 3000, {1: 50.0, 2: 50.0}
    for seed in range(count):
        engine.add_request(prompt, SamplingParams(max_tokens=3, seed=seed, logit_bias=bias, ignore_eos=True))
    outputs = drain(engine)
    seen = Counter(tuple(output.outputs[0].token_ids) for output in outputs.values())

    def probability(tokens: tuple[int, ...]) -> float:
        product = 1.0
        for index, token in enumerate(tokens):
            product *= logits_of([*prompt, *tokens[:index]])[[1, 2]].softmax(0)[token - 1].item()
        return product

    texts = list(itertools.product((1, 2), repeat=3))
    assert seen.keys() <= set(texts)
    chi_square = sum((seen[text] - count * p) ** 2 / (count * p) for text in texts for p in [probability(text)])
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001
    stats = engine.stats()
    assert stats.num_accepted_tokens > 500
    assert stats.num_drafted_tokens - stats.num_accepted_tokens > 300


def test_a_draft_model_that_paused_catches_up() -> None:
    engine = engines(block_size=3)["itself"]
    speculator = engine.speculator
    assert speculator is not None
    depth = [3]
    speculator._choose = lambda sequences, available: [min(depth[0], n) for n in available]  # type: ignore[method-assign]
    engine.add_request(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    accepted = []
    while engine.has_unfinished:
        depth[0] = 0 if 5 < len(accepted) < 12 else 3
        outputs = engine.step()
        accepted.append(engine.stats().num_accepted_tokens)
    assert outputs[0].outputs[0].token_ids == greedy(PROMPTS[2], 60, stop_at_eos=False)
    assert accepted[-1] == engine.stats().num_drafted_tokens
    assert accepted[-1] > accepted[11] + 5


def test_blocks_that_the_draft_model_has_not_computed_are_not_found() -> None:
    """Else the next request's drafts would be made from memory that nobody has written: NaN here."""
    engine = engines(block_size=2)["itself"]
    speculator = engine.speculator
    assert speculator is not None
    speculator._choose = lambda sequences, available: [0] * len(available)  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    text = [1, 2, 3, *drain(engine)["request-0"].outputs[0].token_ids]
    speculator._choose = lambda sequences, available: available  # type: ignore[method-assign]
    request_id = engine.add_request(text, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 2
    assert output.outputs[0].token_ids == greedy(text, 20, stop_at_eos=False)


def test_a_draft_model_must_fit() -> None:
    with pytest.raises(RequestError, match="a draft model needs num_speculative_tokens of at least 1, got 0"):
        toy_engine(draft_model=ToyModel())
    other = ToyModel()
    other.config = type(other.config)(**vars(other.config) | {"vocab_size": 65})
    with pytest.raises(RequestError, match=r"must have the vocabulary of 64 tokens .* got 65 and 96"):
        toy_engine(draft_model=other, num_speculative_tokens=2)


def test_never_more_tokens_than_asked_for() -> None:
    for max_tokens in range(1, 9):
        engine = engines()["itself"]
        engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        assert len(drain(engine)["request-0"].outputs[0].token_ids) == max_tokens
        assert engine.stats().num_drafted_tokens == engine.stats().num_accepted_tokens


def index_of(tokens: list[int]) -> NgramIndex:
    index = NgramIndex()
    for end in range(1, len(tokens)):  # as it comes to know a growing text
        index.extend(tokens[:end], end)
        index.look_up(tokens[:end], 3)
    index.extend(tokens, 2)
    index.look_up(tokens, 4)
    return index


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3], []),
        ([5], []),
        ([1, 2, 7, 8, 9, 1, 2], [7, 8, 9, 1]),
        ([1, 2, 7, 7, 1, 2, 9, 9, 1, 2], [9, 9, 1, 2]),  # the newest occurrence
        ([5, 1, 2, 7, 7, 6, 1, 2, 9, 9, 5, 1, 2], [7, 7, 6, 1]),  # but of the longest n-gram
        ([4, 5, 4, 5], [4, 5, 4, 5]),  # which may go on with itself
        ([8, 8, 8], [8, 8, 8, 8]),
    ],
)
def test_ngrams(tokens: list[int], guess: list[int]) -> None:
    assert index_of(tokens).guess == guess
    fresh = NgramIndex()
    while fresh.extend(tokens, 3):
        pass
    fresh.look_up(tokens, 4)
    assert fresh.guess == guess


def test_step_costs() -> None:
    costs = StepCosts()
    assert costs.estimate(9) / costs.estimate(1) == 3.0
    for seconds in (9.0, 1.0, 1.0, 50.0, 1.0):  # the first records, one was disturbed
        costs.add(1, seconds)
    assert costs.estimate(1) == 1.0
    assert costs.estimate(5) == 2.0
    for seconds in (9.0, 7.0, 7.0):
        costs.add(5, seconds)
    assert costs.estimate(5) == 2.0, "two samples are not enough"
    costs.add(5, 7.0)
    assert costs.estimate(5) == 7.0
    for _ in range(StepCosts.STALE + 1):
        costs.add(1, 1.0)
    assert costs.estimate(5) == 2.0, "what was long ago is forgotten"


def speculator_with(rate: float, cost_per_token: float) -> tuple[NgramSpeculator, Sequence]:
    speculator = NgramSpeculator(8)
    sequence = Sequence("r", [1, 2, 3, 4, 5] * 5, SamplingParams(), seed=0)
    sequence.num_computed_tokens = len(sequence) - 1
    sequence.num_prefill_tokens = 3
    for num_tokens in range(1, 10):
        for _ in range(4):
            speculator._costs.add(num_tokens, 1 + cost_per_token * (num_tokens - 1))
    for index in range(400):
        speculator._learn(sequence, (index * 0.618) % 1 < rate)
    return speculator, sequence


@pytest.mark.parametrize(
    ("rate", "cost_per_token", "depths"),
    [
        (1.0, 0.0, {7}),  # eight tokens with the one that is certain; nine would cost as much as twelve
        (1.0, 0.3, {7}),
        (0.9, 0.25, {3, 7}),
        (0.5, 0.25, {1, 2}),
        (0.2, 0.25, {0}),
        (0.9, 1.0, {0}),
    ],
)
def test_how_far_ahead_it_guesses(rate: float, cost_per_token: float, depths: set[int]) -> None:
    speculator, sequence = speculator_with(rate, cost_per_token)
    speculator.choose_num_drafts([sequence])
    assert sequence.num_drafts in depths


def test_a_batch_wants_more_than_a_small_gain() -> None:
    """Of guesses that are right 0.6 times one gains 1.6 / 1.4 alone; in four sequences one each gains 6.4 / 4 in a step
    of 1.56 / 1.24 the time, which is 1.27, or of 1.35 / 1.15, which is 1.36."""
    for num_sequences, cost_per_token, drafts in ((1, 0.4, True), (4, 0.08, False), (4, 0.05, True)):
        pairs = [speculator_with(0.6, cost_per_token) for _ in range(num_sequences)]
        sequences = [sequence for _, sequence in pairs]
        pairs[0][0].choose_num_drafts(sequences)
        assert any(sequence.num_drafts for sequence in sequences) == drafts, (num_sequences, cost_per_token)


def test_only_sequences_whose_guesses_are_right_get_any() -> None:
    speculator, good = speculator_with(0.95, 0.25)
    _, bad = speculator_with(0.1, 0.25)
    speculator.choose_num_drafts([good, bad])
    assert good.num_drafts > 2
    assert bad.num_drafts == 0


def test_it_learns_from_guesses_that_nobody_verified() -> None:
    speculator, sequence = speculator_with(0.0, 0.3)
    speculator.choose_num_drafts([sequence])
    assert sequence.num_drafts == 0
    for token in [1, 2, 3, 4, 5] * 6:
        sequence.append(token)
        sequence.num_computed_tokens += 1
        speculator.choose_num_drafts([sequence])
    assert sequence.num_drafts > 3
    chunk = Chunk(sequence, 1, num_drafts=2)
    speculator.propose([chunk])
    assert chunk.drafts == [1, 2]


def test_it_learns_nothing_from_what_follows_a_wrong_draft() -> None:
    speculator, sequence = speculator_with(0.5, 0.3)
    rates = []
    for num_drafts in (2, 8):
        sequence.acceptance = Acceptance(0.5)
        speculator.record_accepted(Chunk(sequence, 1, drafts=[1] * num_drafts), 1)
        rates.append(sequence.acceptance.rate)
    assert rates[0] == rates[1]
    assert (speculator.num_drafted, speculator.num_accepted) == (10, 2)


def test_a_draft_model_that_did_not_pay_is_tried_again() -> None:
    engine = toy_engine(draft_model=Forgetful(), num_speculative_tokens=3)
    speculator = engine.speculator
    assert speculator is not None
    speculator._acceptance = 0.0
    speculator._costs.estimate = lambda num_tokens: 10.0 + num_tokens  # type: ignore[method-assign]
    engine.add_request([1, 2], SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    engine.step()
    engine.scheduler.running[0].acceptance = Acceptance(0.0)
    for _ in range(RETRY_STEPS - 2):
        engine.step()
    assert engine.stats().num_drafted_tokens == 0
    for _ in range(3):
        engine.step()
    assert engine.stats().num_drafted_tokens > 0


def test_a_sequence_is_tried_again_though_others_get_drafts() -> None:
    engine = toy_engine(draft_model=ToyModel(), num_speculative_tokens=2)
    speculator = engine.speculator
    assert speculator is not None
    speculator._costs.estimate = lambda num_tokens: 10.0 + num_tokens  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, params)
    while len(engine.scheduler.running) < 2 or not all(s.is_decoding for s in engine.scheduler.running):
        engine.step()
    unlucky = engine.scheduler.running[1]
    unlucky.acceptance = Acceptance(0.0)
    tried = []
    for _ in range(RETRY_STEPS + 1):
        engine.step()
        tried.append(unlucky.num_drafts)
    assert tried[0] == 0
    assert any(tried)


def test_where_it_does_not_pay_there_is_none() -> None:
    engine = toy_engine(num_speculative_tokens=4)
    assert engine.speculator is not None
    engine.speculator._costs.estimate = lambda num_tokens: num_tokens  # type: ignore[method-assign]
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    outputs = drain(engine)
    assert engine.stats().num_drafted_tokens == 0
    assert [outputs[f"request-{i}"].outputs[0].token_ids for i in range(6)] == [greedy(p, 20) for p in PROMPTS]


@pytest.mark.parametrize("method", ["ngram", "a draft model", "itself"])
def test_blocks_of_accepted_drafts_are_found(method: str) -> None:
    engine = engines(block_size=4)[method]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add_request([1, 2, 3], params)
    text = [1, 2, 3, *drain(engine)["request-0"].outputs[0].token_ids]
    request_id = engine.add_request([*text, 7], params)
    output = drain(engine)[request_id]
    assert output.num_cached_tokens in (36, 40)  # a draft model may have missed the newest tokens
    assert output.outputs[0].token_ids == greedy([*text, 7], 40, stop_at_eos=False)


def test_drafts_that_were_accepted_after_the_end_are_not_committed() -> None:
    """The model has computed more tokens than the text takes."""
    engine = engines(block_size=1)["itself"]
    expected = greedy([1, 2, 3], 20, stop_at_eos=False)
    stop = next(token for index, token in enumerate(expected) if index > 6 and token not in expected[:index])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    engine.add_request([1, 2, 3], params)
    text = drain(engine)["request-0"].outputs[0].token_ids
    assert text == expected[: expected.index(stop) + 1]
    keys = [content.tokens for content in engine.block_manager.pools[0]._contents if content is not None]
    assert all(len(tokens) == 8 for tokens in keys), "each of one token"
    assert 3 < len(keys) <= 3 + len(text)


@pytest.mark.parametrize("depth", [0, 3])
def test_failed_steps_do_not_count_as_tokens_that_the_draft_model_missed(depth: int) -> None:
    engine = engines(block_size=4)["itself"]
    speculator = engine.speculator
    assert speculator is not None
    speculator._choose = lambda sequences, available: [min(depth, n) for n in available]  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.model.fail = True  # type: ignore[attr-defined]
    for _ in range(20):
        with pytest.raises(RuntimeError, match="the model broke"):
            engine.step()
    engine.model.fail = False  # type: ignore[attr-defined]
    speculator._choose = lambda sequences, available: available  # type: ignore[method-assign]
    assert drain(engine)["request-0"].outputs[0].token_ids == greedy([1, 2, 3], 40, stop_at_eos=False)
    assert engine.stats().num_accepted_tokens == engine.stats().num_drafted_tokens > 20


def test_after_a_preemption_the_draft_model_has_missed_nothing() -> None:
    engine = engines(block_size=2, num_kv_blocks=24, max_model_len=48, enable_prefix_caching=False)["itself"]
    speculator = engine.speculator
    assert speculator is not None
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    speculator._choose = lambda sequences, available: [0] * len(available)  # type: ignore[method-assign]
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS[:3]]
    while not engine.stats().num_preemptions:
        engine.step()
    assert any(sequence.draft_gap > len(sequence) / 3 for sequence in engine.scheduler.waiting)
    speculator._choose = lambda sequences, available: available  # type: ignore[method-assign]
    outputs = drain(engine)
    for request_id, prompt in zip(ids, PROMPTS, strict=False):
        length = min(30, 48 - len(prompt))
        assert outputs[request_id].outputs[0].token_ids == greedy(prompt, length, stop_at_eos=False)
    assert engine.stats().num_drafted_tokens == engine.stats().num_accepted_tokens > 0
