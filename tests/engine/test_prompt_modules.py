"""Prompts of modules: each module is computed once, by itself, and a text does not depend on what is in the cache."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.toy import VOCAB_SIZE, ToyModel, always_speculate, check_blocks, drain, extended, random_logits, toy_engine
from torch import Tensor

from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_layout import Piece, PromptLayout
from fastinfer.errors import RequestError
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.sampling_params import SamplingParams

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
A, B, C = list(range(1, 10)), list(range(10, 24)), list(range(30, 43))
# Each module is at the same position in all prompts.
PROMPTS = {
    "all": [Piece(A, 0, True), Piece([50], 9), Piece(B, 12, True), Piece(C, 30, True), Piece([51, 52, 53], 43)],
    "without the first": [Piece(B, 12, True), Piece(C, 30, True), Piece([51, 52], 43)],
    "without the second": [Piece(A, 0, True), Piece(C, 30, True), Piece([51, 52], 43)],
    "after text": [Piece([44, 45], 0), Piece(B, 12, True), Piece([46] * 9, 26)],
    "at the end": [Piece([44], 3), Piece(list(range(45, 53)), 12, True)],
    "the beginning": [Piece(A, 0, True), Piece([50, 51], 9)],
    "less than a block": [Piece(A, 0, True), Piece([7] * 3, 12, True), Piece([8] * 2, 20)],
}


def hash_of(seen: list[int], token: int, position: int) -> int:
    value = 17
    for number in seen:
        value = extended(value, number)
    return extended(value, token + VOCAB_SIZE * position)


def number(value: int) -> int:
    """The part of a hash that the cache holds exactly."""
    return value % 2**20


class SeeingToy(ToyModel):
    """Stores for each token a hash of what it saw: the text is another one if any token saw anything else."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        hashes: list[int] = []
        for row, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            length = int(batch.seq_lens[row])
            for cache in kv_cache:
                assert isinstance(cache, LayerCache)
                blocks = batch.block_tables[0][row, : -(-length // BLOCK_SIZE)].long()
                seen = cache.k[blocks].flatten()[: length - (end - start)].int().tolist()
            for token, position in zip(batch.token_ids[start:end], batch.positions[start:end], strict=True):
                hashes.append(hash_of(seen, int(token), int(position)))
                seen.append(number(hashes[-1]))
            for cache in kv_cache:
                assert isinstance(cache, LayerCache)
                cache.k.view(-1)[batch.slot_mappings[0][start:end]] = torch.tensor(seen[start - end :]).float()
        return torch.tensor(hashes)[:, None]


def expected(pieces: list[Piece], recomputed: int = 1, max_tokens: int = 6) -> list[int]:
    """Decode greedily without any engine."""
    shared: list[int] = []  # of the modules' blocks
    own: list[int] = []  # of all other tokens
    value = 0

    def read(tokens: list[int], position: int) -> None:
        nonlocal value
        for offset, token in enumerate(tokens):
            value = hash_of(shared + own, token, position + offset)
            own.append(number(value))

    for index, piece in enumerate(pieces):
        tokens, position = piece.token_ids, piece.position
        whole = (len(tokens) - (index == len(pieces) - 1)) // BLOCK_SIZE * BLOCK_SIZE if piece.is_module else 0
        again = recomputed * BLOCK_SIZE if index else 0
        if whole <= again:
            whole = again = 0
        alone: list[int] = []
        for offset, token in enumerate(tokens[:whole]):
            alone.append(number(hash_of(alone, token, position + offset)))
        read(tokens[:again], position)
        shared += alone[again:]
        read(tokens[whole:], position + whole)
    text: list[int] = []
    position = pieces[-1].position + len(pieces[-1].token_ids)
    for _ in range(max_tokens):
        text.append(int(random_logits(value).argmax()))
        read(text[-1:], position)
        position += 1
    return text


def module_engine(**limits: Any) -> Engine:
    return toy_engine(model=SeeingToy(), block_size=BLOCK_SIZE, **limits)


def add(
    engine: Engine, pieces: list[Piece], recomputed: int = 1, params: SamplingParams = GREEDY, **options: Any
) -> str:
    layout = PromptLayout(pieces, BLOCK_SIZE, recomputed)
    return engine.add_request(engine.validate(layout.token_ids, params, layout=layout), params, **options)


def read_tokens(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("budget", [3, 512])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_second_request_reuses_the_modules(name: str, budget: int, recomputed: int) -> None:
    engine, pieces = module_engine(max_num_batched_tokens=budget, max_num_seqs=2), PROMPTS[name]
    engine.on_step = lambda step: computed.append(step.work.num_prompt_tokens)
    totals = []
    for _ in range(2):
        computed: list[int] = []
        request_id = add(
            engine, pieces, recomputed, SamplingParams(temperature=0.0, max_tokens=6, n=2, ignore_eos=True)
        )
        output = drain(engine)[request_id]
        assert [each.token_ids for each in output.outputs] == [expected(pieces, recomputed)] * 2
        assert output.prompt_token_ids == read_tokens(pieces)
        totals.append((output.num_cached_tokens, sum(computed)))
        check_blocks(engine)
    (first, everything), (second, rest) = totals
    assert (first, everything) == (0, len(PromptLayout(pieces, BLOCK_SIZE, recomputed).token_ids))
    assert rest == everything - engine.block_manager.num_hit_tokens
    assert second <= len(output.prompt_token_ids) - 1


def test_only_missing_modules_are_computed() -> None:
    """Also where a missing one precedes a known one, in what is read and in the block table."""
    engine = module_engine()
    computed: list[int] = []
    engine.on_step = lambda step: computed.append(step.work.num_prompt_tokens)
    for name in ("without the second", "all"):
        computed.clear()
        request_id = add(engine, PROMPTS[name])
        assert drain(engine)[request_id].outputs[0].token_ids == expected(PROMPTS[name])
        check_blocks(engine)
    # B, 12 tokens in whole blocks; then a token of A, the parameter, 4 + 2 of B, 4 + 1 of C, and the text.
    assert sum(computed) == 12 + 1 + 1 + 6 + 5 + 3


def test_tenants_share_nothing() -> None:
    engine = module_engine()
    for salt, is_cached in (("one", False), ("two", False), ("", False), ("one", True), ("two", True)):
        request_id = add(engine, PROMPTS["all"], cache_salt=salt)
        output = drain(engine)[request_id]
        assert bool(output.num_cached_tokens) is is_cached
        assert output.outputs[0].token_ids == expected(PROMPTS["all"])
    assert engine.block_manager.num_hit_tokens == 2 * 44, "all but the last block of each second request"


def test_a_module_elsewhere_is_another_one() -> None:
    engine = module_engine()
    for position in (12, 16, 12):
        pieces = [Piece([1], 0), Piece(B, position, True), Piece([2], 40)]
        request_id = add(engine, pieces)
        output = drain(engine)[request_id]
        assert output.outputs[0].token_ids == expected(pieces)
    assert engine.block_manager.num_hit_tokens == 16, (
        "of the third prompt alone: three blocks of the module, and one more"
    )


def test_the_first_module_is_an_ordinary_beginning() -> None:
    engine = module_engine()
    pieces = PROMPTS["the beginning"]
    plain = engine.add_request(read_tokens(pieces), GREEDY)
    text = drain(engine)[plain].outputs[0].token_ids
    request_id = add(engine, pieces)
    output = drain(engine)[request_id]
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (8, text)


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_texts_do_not_depend_on_other_requests(seed: int, speculates: bool) -> None:
    """A small cache, so that sequences are preempted and modules evicted."""
    rng = random.Random(seed)
    engine = module_engine(
        num_kv_blocks=20,
        max_model_len=80,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        num_speculative_tokens=2 * speculates,
    )
    if speculates:
        always_speculate(engine)
    wanted, outputs = {}, {}
    for _ in range(25):
        name = rng.choice(list(PROMPTS))
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 20), ignore_eos=True)
        request_id = add(engine, PROMPTS[name], params=params, cache_salt=rng.choice(["", "other"]))
        wanted[request_id] = expected(PROMPTS[name], max_tokens=params.max_tokens or 0)
        for _ in range(rng.randint(0, 4)):
            outputs.update({output.request_id: output for output in engine.step()})
        check_blocks(engine)
    outputs.update(drain(engine))
    check_blocks(engine)
    assert {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()} == wanted
    assert engine.scheduler.num_preemptions > 0
    assert engine.block_manager.num_hit_tokens > 0


def test_a_pinned_prompt_of_modules() -> None:
    engine = module_engine(num_kv_blocks=44, max_model_len=80)
    pieces = PROMPTS["all"]
    layout = PromptLayout(pieces, BLOCK_SIZE, 1)
    request_id = engine.pin_prompt("all", engine.validate(layout.token_ids, layout=layout))
    assert drain(engine)[request_id].prompt_token_ids == read_tokens(pieces)
    for index in range(6):
        engine.add_request([index] * 60, GREEDY)
    drain(engine)
    pinned = engine.pinned_prompt("all")
    assert pinned.layout is layout
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    token_ids = [*pinned.token_ids, 60, 61]
    request_id = engine.add_request(engine.validate(token_ids, params, layout=layout), params)
    output = drain(engine)[request_id]
    continued = [*pieces[:-1], Piece([*pieces[-1].token_ids, 60, 61], pieces[-1].position)]
    assert output.outputs[0].token_ids == expected(continued)
    assert output.prompt_token_ids == read_tokens(continued)
    assert output.num_cached_tokens >= 24
    engine.sleep()
    engine.wake_up()
    request_id = add(engine, PROMPTS["without the first"])
    output = drain(engine)[request_id]
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (20, expected(PROMPTS["without the first"]))


def test_positions_end_with_the_longest_sequence() -> None:
    engine = module_engine(max_model_len=40)
    request_id = add(engine, [Piece([1, 2], 30)], params=SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(drain(engine)[request_id].outputs[0].token_ids) == 8
    with pytest.raises(RequestError, match="prompt must be shorter than max_model_len=40 tokens, got 42"):
        add(engine, [Piece([1, 2], 40)])


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (lambda: module_engine(enable_prefix_caching=False), "enable_prefix_caching=True, got False"),
        (lambda: toy_engine(ToyModel(), num_speculative_tokens=2), "an engine without a draft model"),
        (lambda: toy_engine(model=ToyModel((0, 8))), "a model whose layers all attend to the whole text"),
    ],
)
def test_engines_without_modules(make: Any, needed: str) -> None:
    with pytest.raises(RequestError, match=f"prompt modules need {needed}"):
        add(make(), PROMPTS["all"])


@pytest.mark.parametrize("option", ["prompt_logprobs", "truncate_prompt_tokens"])
def test_options_that_need_a_prompt_without_modules(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} must be None for a prompt with modules, got 1"):
        add(module_engine(), PROMPTS["all"], params=replace(GREEDY, **{option: 1}))
