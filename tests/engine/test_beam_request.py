"""Beam search against an exhaustive one written down here, and against transformers on the real model."""

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.tiny_folder import write_tiny_folder
from support.toy import EOS_ID, VOCAB_SIZE, ToyModel, always_speculate, check_blocks, drain, logits_of, toy_engine
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastinfer import LLM
from fastinfer.engine.engine import Engine
from fastinfer.engine.prefix_hash import first_key
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(6)]


@cache
def logprobs_after(*tokens: int) -> list[float]:
    return logits_of(list(tokens)).log_softmax(0).tolist()


class Beam(NamedTuple):
    score: float
    logprob: float
    tokens: list[int]


def search(prompt: list[int], width: int, max_tokens: int, penalty: float, eos: int | None) -> list[list[int]]:
    """The same rules, without an engine."""
    beams, ended = [Beam(0, 0.0, [])], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for beam in beams:
            for token, logprob in enumerate(logprobs_after(*prompt, *beam.tokens)):
                total = beam.logprob + logprob
                candidates.append(Beam(total / length**penalty, total, [*beam.tokens, token]))
        candidates.sort(key=lambda beam: -beam.logprob)
        ended += [beam for beam in candidates[:width] if beam.tokens[-1] == eos]
        beams = [beam for beam in candidates[: 2 * width] if beam.tokens[-1] != eos][:width]
        if length == max_tokens:
            ended += beams
        ended = sorted(ended, key=lambda beam: -beam.score)[:width]
        if len(ended) == width and ended[-1].score >= beams[0].score:
            break
    return [beam.tokens for beam in ended]


def beam_search(engine: Engine, prompt: list[int], params: BeamSearchParams) -> Any:
    request_id = engine.add_beam_request(prompt, params)
    return drain(engine)[request_id]


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_best_texts(width: int, penalty: float, ignore_eos: bool) -> None:
    engine = toy_engine(block_size=3)
    for prompt in PROMPTS:
        params = BeamSearchParams(width, max_tokens=9, length_penalty=penalty, ignore_eos=ignore_eos)
        output = beam_search(engine, prompt, params)
        expected = search(prompt, width, 9, penalty, None if ignore_eos else EOS_ID)
        assert [completion.token_ids for completion in output.outputs] == expected
        assert [completion.index for completion in output.outputs] == list(range(width))
        for completion in output.outputs:
            tokens, total = completion.token_ids, 0.0
            for index, token in enumerate(tokens):
                total += logits_of([*prompt, *tokens[:index]]).log_softmax(0)[token].item()
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
            ended = tokens[-1] == EOS_ID and not ignore_eos
            assert completion.finish_reason == ("stop" if ended else "length")
            assert completion.text == engine.tokenizer.decode(tokens[:-1] if ended else tokens)
        assert engine.block_manager.num_used == 0


@pytest.mark.parametrize("width", [2, 3])
def test_several_tokens_that_end_texts(width: int, tmp_path: Path) -> None:
    """The likeliest tokens but one end the text: there are as many beams as in transformers all the same."""
    write_tiny_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    params = BeamSearchParams(width, max_tokens=9, length_penalty=2.0)
    for prompt in ([7, 8, 9], [40, 50, 60, 70], [*range(100, 120)]):
        ids = torch.tensor([prompt])
        likeliest = model(ids).logits[0, -1].topk(2 * width).indices.tolist()
        ends = [256, *likeliest[1:]]  # the first one is the tokenizer's own
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        texts = model.generate(
            ids,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=9,
            length_penalty=2.0,
            do_sample=False,
            eos_token_id=ends,
        )
        llm = LLM(str(tmp_path), dtype="float32", kv_cache_dtype="float32", kv_cache_memory=2**20)
        [output] = llm.beam_search({"prompt_token_ids": prompt}, params)
        for ours, theirs in zip(output.outputs, texts.tolist(), strict=True):
            assert ours.token_ids == theirs[len(prompt) :][: len(ours.token_ids)]


def test_all_beams_have_the_salt_of_their_request() -> None:
    engine = toy_engine()
    request_id = engine.add_beam_request(PROMPTS[1], BeamSearchParams(3, max_tokens=5), cache_salt="salt")
    for _ in range(3):
        beams = engine.requests.active[request_id].sequences
        assert [(beam.cache_salt, beam.first_key) for beam in beams] == [("salt", first_key("salt", ""))] * 3
        engine.step()


def test_texts_that_end_early_are_kept() -> None:
    """Some of the results above must be such, or the test shows little."""
    params = BeamSearchParams(3, max_tokens=30)
    outputs = [beam_search(toy_engine(), prompt, params).outputs for prompt in PROMPTS]
    reasons = {completion.finish_reason for completions in outputs for completion in completions}
    assert "stop" in reasons
    for prompt, completions in zip(PROMPTS, outputs, strict=True):
        assert [c.token_ids for c in completions] == search(prompt, 3, 30, 1.0, EOS_ID)


@pytest.mark.parametrize(
    "limits",
    [
        {"block_size": 2, "num_kv_blocks": 24, "max_model_len": 48, "max_num_seqs": 6},
        {"block_size": 4, "num_kv_blocks": 12, "max_model_len": 48, "max_num_batched_tokens": 5},
        {"num_speculative_tokens": 3},
        {"enable_prefix_caching": False, "block_size": 1, "num_kv_blocks": 40, "max_model_len": 40, "max_num_seqs": 8},
    ],
)
def test_in_company_and_without_room(limits: dict[str, int]) -> None:
    """Beams that are preempted wait for each other, and come back."""
    engine = toy_engine(**limits)
    if "num_speculative_tokens" in limits:
        always_speculate(engine)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    params = BeamSearchParams(4, max_tokens=15)
    ids = {}
    for prompt in PROMPTS:
        engine.add_request(prompt, greedy)
        ids[engine.add_beam_request(prompt, params)] = prompt
    last: dict[str, Any] = {}
    for _ in range(5000):
        if not engine.has_unfinished:
            break
        last.update({output.request_id: output for output in engine.step()})
        check_blocks(engine)
    for request_id, prompt in ids.items():
        completions = last[request_id].outputs
        length = min(15, engine.max_model_len - len(prompt))
        assert [c.token_ids for c in completions] == search(prompt, 4, length, 1.0, EOS_ID)
    if "num_kv_blocks" in limits:
        assert engine.stats().num_preemptions > 0
    assert engine.block_manager.num_used == 0


def test_abort_gives_what_there_is() -> None:
    engine = toy_engine()
    request_id = engine.add_beam_request([1, 2], BeamSearchParams(3, max_tokens=30, ignore_eos=True))
    for _ in range(5):
        assert engine.step() == []
    output = engine.abort(request_id)
    assert output is not None
    assert [len(completion.token_ids) for completion in output.outputs] == [5, 5, 5]
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert engine.block_manager.num_used == 0


@pytest.mark.parametrize(("budget", "penalty"), [(1, -1.0), (64, 0.0), (1, 1.5)])
def test_abort_at_any_step_gives_the_best_texts_so_far(budget: int, penalty: float) -> None:
    """Texts that had ended keep their reason; all scores are finite, and the best text comes first."""
    params = BeamSearchParams(3, max_tokens=30, length_penalty=penalty)
    found = set()
    for prompt in PROMPTS:
        for num_steps in range(40):
            engine = toy_engine(max_num_batched_tokens=budget)
            request_id = engine.add_beam_request(prompt, params)
            for _ in range(num_steps):
                engine.step()
            output = engine.abort(request_id)
            if output is None:
                break
            scores, texts = [], [completion.token_ids for completion in output.outputs]
            assert 1 <= len(texts) <= 3
            assert len({tuple(tokens) for tokens in texts}) == len(texts)
            for index, completion in enumerate(output.outputs):
                tokens, total = completion.token_ids, 0.0
                for length, token in enumerate(tokens):
                    total += logprobs_after(*prompt, *tokens[:length])[token]
                assert completion.index == index
                assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
                ended = tokens[-1:] == [EOS_ID]
                assert (completion.finish_reason, completion.stop_reason) == ("stop" if ended else "abort", None)
                assert completion.text == engine.tokenizer.decode(tokens[:-1] if ended else tokens)
                scores.append(total / max(len(tokens), 1) ** penalty)
                found.add((completion.finish_reason, min(len(tokens), 1)))
            assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert found == {("abort", 0), ("abort", 1), ("stop", 1)}


def test_the_message_of_an_error_is_the_reason_of_unfinished_texts_alone() -> None:
    engine = toy_engine()
    prompt = next(p for p in PROMPTS if "stop" in reasons_after(p, 12))
    request_id = engine.add_beam_request(prompt, BeamSearchParams(3, max_tokens=30))
    for _ in range(12):
        engine.step()
    engine.requests.fail(engine.requests.active[request_id], ValueError("broken"))
    [output] = engine.step()
    assert isinstance(output, RequestOutput)
    reasons = {(completion.finish_reason, completion.stop_reason) for completion in output.outputs}
    assert ("stop", None) in reasons
    [(other, message)] = reasons - {("stop", None)}
    assert other == "error"
    assert "broken" in str(message)


def reasons_after(prompt: list[int], num_steps: int) -> set[str]:
    """Why the texts ended, of a search that is aborted after some steps; empty if it had ended."""
    engine = toy_engine()
    request_id = engine.add_beam_request(prompt, BeamSearchParams(3, max_tokens=30))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort(request_id)
    return set() if output is None else {completion.finish_reason for completion in output.outputs}


class Strict(ToyModel):
    """Some tokens are impossible, and only one is possible after another one."""

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden, indices, adapter_ids)
        logits[:, 2:] = -torch.inf
        return logits


@pytest.mark.parametrize("width", [1, 2, 5])
def test_impossible_tokens_are_in_no_text(width: int) -> None:
    """Only two tokens are possible, one of which ends the text: there are fewer texts than beams."""
    engine = toy_engine(model=Strict())
    output = beam_search(engine, [5, 6], BeamSearchParams(width, max_tokens=3))
    texts = [completion.token_ids for completion in output.outputs]
    possible = [[EOS_ID], [1, EOS_ID], [1, 1, EOS_ID], [1, 1, 1]]
    assert len(texts) == min(width, 4)
    assert all(text in possible for text in texts)
    assert all(math.isfinite(completion.cumulative_logprob) for completion in output.outputs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer in 1..10, got 0"),
        ({"beam_width": 11}, "beam_width must be an integer in 1..10, got 11"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be an integer in 1..2147483647, got 0"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty must be a number in .*, got nan"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"beam_width": 9}, "beam_width must be an integer in 1..8, got 9"),
    ],
)
def test_what_cannot_be_searched(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        toy_engine(max_num_seqs=8).add_beam_request([1], BeamSearchParams(**fields))


@pytest.mark.parametrize("seed", [21, 78, 102])  # where it would happen
def test_beams_never_take_more_places_than_there_are(seed: int) -> None:
    """While some beams are preempted others take their places; then all go on from one that still runs."""
    ignore_eos = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    rng = random.Random(seed)
    engine = toy_engine(
        block_size=rng.choice([1, 2, 4]),
        max_model_len=24,
        num_kv_blocks=rng.choice([24, 26, 30]),
        max_num_seqs=rng.choice([3, 4, 5]),
        max_num_batched_tokens=rng.choice([1, 2, 3, 64]),
    )
    searches = {}
    for _ in range(8):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
        if rng.random() < 0.5:
            request_id = engine.add_beam_request(prompt, BeamSearchParams(3, max_tokens=12, ignore_eos=True))
            searches[request_id] = prompt
        else:
            engine.add_request(prompt, ignore_eos, priority=rng.randrange(-1, 2))
        for _ in range(rng.randrange(4)):
            engine.step()
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id in searches:
                tokens = [completion.token_ids for completion in output.outputs]
                assert tokens == search(searches.pop(output.request_id), 3, 12, 1.0, None)
        check_blocks(engine)
    assert not searches


def test_nothing_is_guessed_for_beams() -> None:
    """They do not go on with the likeliest token alone."""
    engine = always_speculate(toy_engine(draft_model=ToyModel(), num_speculative_tokens=3))
    for prompt in PROMPTS[:3]:
        output = beam_search(engine, prompt, BeamSearchParams(3, max_tokens=12))
        assert [completion.token_ids for completion in output.outputs] == search(prompt, 3, 12, 1.0, EOS_ID)
    assert engine.stats().num_drafted_tokens == 0
