"""Kernels that compute prompts differently than generated tokens: a token's role follows from its request alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kv_files import GIB, wait_for_files
from support.tiny_decoder import make_batch, make_cache, make_decoder
from support.toy import (
    NUM_LAYERS,
    ForgetfulRoleToy,
    RoleToy,
    always_speculate,
    as_prompt,
    drain,
    first_prompt_row,
    greedy,
    logits_of,
    prompts,
    toy_engine,
)

from fastinfer import ops
from fastinfer.engine import engine as engine_module
from fastinfer.engine import roles
from fastinfer.engine.engine import Engine
from fastinfer.engine.roles import roles_differ
from fastinfer.evaluation.perplexity import log_probabilities
from fastinfer.models.batch import LastRows
from fastinfer.models.config import RouterConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.norm import RMSNorm
from fastinfer.ops.prompt import NO_ROW
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.weights.expert_weights import DenseExperts
from fastinfer.weights.weight import DenseWeight

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "roles_differ", lambda device, exact: True)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """Decode greedily without any engine: the prompt, and nothing else, is computed as one."""
    known = as_prompt(prompt)
    for _ in range(max_tokens):
        known.append(int(logits_of(known).argmax()))
    return known[len(prompt) :]


def role_engine(**options: Any) -> Engine:
    return toy_engine(model=RoleToy(), **{"block_size": BLOCK_SIZE, **options})


def run(engine: Engine, prompt: list[int], max_tokens: int, **options: Any) -> Any:
    request_id = engine.add_request(prompt, params(max_tokens), **options)
    return drain(engine)[request_id]


def tokens(output: Any) -> list[int]:
    token_ids: list[int] = output.outputs[0].token_ids
    return token_ids


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, differ in (("avx512_vnni", False), ("avx512_bf16", True), ("amx", True), ("amx_emulated", True)):
        monkeypatch.setattr(roles, "_C", SimpleNamespace(cpu_info=lambda isa=isa: {"isa": isa}))
        assert roles_differ("cpu", exact=False) is differ
        assert roles_differ("cpu", exact=True) is False
        assert roles_differ("cuda:1", exact=False) is False


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_prompts_and_generated_tokens_in_one_batch(budget: int) -> None:
    engine = role_engine(max_num_batched_tokens=budget)
    wanted = {}
    for prompt in prompts(8):
        wanted[engine.add_request(prompt, params(12))] = expected(prompt, 12)
        engine.step()
    outputs = drain(engine)
    assert {request_id: tokens(outputs[request_id]) for request_id in wanted} == wanted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("budget", [5, 64])
def test_preempted_sequences_compute_their_generated_tokens_as_such(budget: int, deterministic: bool) -> None:
    engine = role_engine(num_kv_blocks=12, max_model_len=48, max_num_batched_tokens=budget, deterministic=deterministic)
    wanted = {engine.add_request(prompt, params(20)): expected(prompt, 20) for prompt in prompts(6)}
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert {request_id: tokens(outputs[request_id]) for request_id in wanted} == wanted


def test_drafts_are_verified_as_generated_tokens() -> None:
    limits = {"num_kv_blocks": 12, "max_model_len": 48, "max_num_batched_tokens": 16}
    engine = always_speculate(role_engine(draft_model=ForgetfulRoleToy(), num_speculative_tokens=3, **limits))
    wanted = {}
    for prompt in prompts(6):
        wanted[engine.add_request(prompt, params(20))] = expected(prompt, 20)
        engine.step()
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert 10 < engine.stats().num_accepted_tokens < engine.stats().num_drafted_tokens
    assert {request_id: tokens(outputs[request_id]) for request_id in wanted} == wanted


def test_completions_and_beams_that_share_a_prompt() -> None:
    prompt = list(range(1, 15))
    engine = role_engine(num_kv_blocks=14, max_model_len=40)
    request_id = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12, n=4, ignore_eos=True))
    beam_id = engine.add_beam_request(prompt, BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs[request_id].outputs] == [expected(prompt, 12)] * 4
    assert tokens(outputs[beam_id]) == expected(prompt, 6)


def test_all_tokens_of_an_embedding_are_those_of_a_prompt() -> None:
    prompt = list(range(1, 20))
    vectors = []
    for pooling in ("last", "mean"):
        engine = role_engine(max_num_batched_tokens=7)
        request_id = engine.add_embedding_request(prompt, pooling=pooling, normalize=False)
        vectors.append(torch.tensor(drain(engine)[request_id].embedding))
    known = as_prompt(prompt)
    rows = torch.stack([logits_of(known[:end])[:8] for end in range(1, len(known) + 1)]).double()
    assert torch.allclose(vectors[0].double(), rows[-1])
    assert torch.allclose(vectors[1].double(), rows.mean(0))


def chat(engine: Engine, turns: int = 4) -> Iterator[tuple[list[int], Any]]:
    """The prompt of each turn, which repeats all questions and answers before it, and its output."""
    text: list[int] = []
    for turn in range(turns):
        text += [(5 * turn + j) % 60 + 1 for j in range(6)]
        output = run(engine, text, 10)
        yield text, output
        text = text + tokens(output)


def test_a_deterministic_engine_computes_answers_again_when_they_become_prompts() -> None:
    """It finds what was a prompt before, and its own pinned prompt, but no block with generated tokens."""
    engine = role_engine(deterministic=True)
    end_of_last_prompt = 0
    for text, output in chat(engine):
        assert tokens(output) == expected(text, 10)
        assert output.num_cached_tokens == end_of_last_prompt // BLOCK_SIZE * BLOCK_SIZE
        end_of_last_prompt = len(text)


def test_by_default_answers_are_found_when_they_become_prompts() -> None:
    engine, plain = role_engine(), toy_engine(block_size=BLOCK_SIZE)
    hits = [output.num_cached_tokens for _, output in chat(engine)]
    assert hits == [output.num_cached_tokens for _, output in chat(plain)]
    assert hits == [0, 12, 28, 44]


def test_nothing_changes_where_roles_do_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "roles_differ", lambda device, exact: False)
    engine = toy_engine(block_size=BLOCK_SIZE, deterministic=True)
    hits = []
    for text, output in chat(engine):
        assert tokens(output) == greedy(text, 10, stop_at_eos=False)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 12, 28, 44]
    watched = role_engine(deterministic=True, num_kv_blocks=12, max_model_len=48)
    wanted = {watched.add_request(p, params(20)): greedy(p, 20, stop_at_eos=False) for p in prompts(6)}
    outputs = drain(watched)
    assert watched.stats().num_preemptions > 0
    assert {request_id: tokens(outputs[request_id]) for request_id in wanted} == wanted


@pytest.mark.parametrize("store", ["host", "disk"])
def test_stores_beyond_the_cache_know_roles(store: str, tmp_path: Path) -> None:
    """A cache of the size of one sequence, so that the other blocks come from the store."""
    options: dict[str, Any] = {"num_kv_blocks": 16, "max_model_len": 64, "deterministic": True}
    if store == "host":
        options["kv_offloading_size"] = 100 * BLOCK_SIZE * NUM_LAYERS * 2 * 4 / GIB
    else:
        options["kv_offloading_dir"] = tmp_path
    engine = role_engine(**options)
    for round_number in range(2):
        for text, output in chat(engine):
            assert tokens(output) == expected(text, 10)
            assert round_number == 0 or output.num_cached_tokens >= (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
        run(engine, [61] * 50, 10)  # takes all blocks
        if store == "disk":
            assert engine.offloading is not None
            assert engine.offloading.disk is not None
            wait_for_files(engine.offloading.disk)
            engine = role_engine(**options)


def test_texts_are_evaluated_as_prompts() -> None:
    text = list(range(1, 20))
    [found] = log_probabilities(RoleToy(), [text], torch.float32)  # type: ignore[arg-type]
    known = as_prompt(text)
    rows = torch.stack([logits_of(known[:end]) for end in range(1, len(known) + 1)])
    assert torch.equal(found, rows.log_softmax(-1))


def test_rows_of_experts_have_the_role_of_their_token() -> None:
    """The second product reads a row for each token and expert."""
    found = []

    class Watched(DenseExperts):
        def linear(self, x: torch.Tensor, routing: ops.Routing, *, activation: str | None = None) -> torch.Tensor:
            found.append((len(x), first_prompt_row()))
            return super().linear(x, routing, activation=activation)

    norm, router = RMSNorm(torch.ones(32), 1e-6), DenseWeight(torch.randn(5, 32))
    stacks = Watched(torch.randn(5, 64, 32)), Watched(torch.randn(5, 32, 32))
    mixture = MixtureOfExperts(norm, router, *stacks, top_k=3, routing=RouterConfig(), activation="silu")
    x = torch.randn(7, 32)
    with ops.prompt_rows(4):
        mixture(x, x, None)
        assert first_prompt_row() == 4
    mixture(x, x, None)
    assert found == [(7, 4), (21, 12), (7, NO_ROW), (21, NO_ROW)]


@pytest.mark.parametrize("exact", [False, True])
def test_an_exact_model_computes_prompts_like_all_else(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in its last layers, if these compute some rows alone."""
    found = []

    def compute(self: Decoder, indices: range, x: torch.Tensor, *_: Any) -> torch.Tensor:
        found.append(first_prompt_row())
        return x

    monkeypatch.setattr(Decoder, "_compute", compute)
    batch = make_batch([5, 3])
    last = LastRows(torch.tensor([4, 7]), batch.positions[[4, 7]], torch.tensor([0, 1, 2]), None, first_prompt_row=1)
    with ops.prompt_rows(5):
        replace(make_decoder(), exact=exact).forward(replace(batch, last=last), make_cache())
    assert found == ([NO_ROW, NO_ROW] if exact else [5, 1])
