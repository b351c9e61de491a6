"""The engine on a toy model: every request's text must equal what the request alone would give."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.toy import (
    EOS_ID,
    MAX_POSITION,
    VOCAB_SIZE,
    ToyModel,
    ToyTokenizer,
    always_speculate,
    check_blocks,
    drain,
    greedy,
    logits_of,
    prompts,
    toy_engine,
)

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def complete(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    request_id = engine.add_request(prompt, params)
    return drain(engine)[request_id]


@pytest.mark.parametrize("block_size", [1, 3, 32])
@pytest.mark.parametrize("budget", [1, 7, 64, 512])
def test_batched_equals_sequential(block_size: int, budget: int) -> None:
    engine = toy_engine(block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=5)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts(9)]
    outputs = drain(engine)
    for request_id, prompt in zip(ids, prompts(9), strict=True):
        assert outputs[request_id].outputs[0].token_ids == greedy(prompt, 12)
        assert outputs[request_id].prompt_token_ids == prompt
    assert max(engine.model.batch_sizes) <= budget
    assert engine.stats().num_used_blocks == 0


def test_preemption_changes_no_text() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=5, ignore_eos=True)
    alone = [complete(toy_engine(), prompt, params).outputs[0] for prompt in prompts(6)]
    engine = toy_engine(block_size=2, num_kv_blocks=24, max_model_len=48)
    ids = [engine.add_request(prompt, params) for prompt in prompts(6)]
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    for request_id, expected, prompt in zip(ids, alone, prompts(6), strict=True):
        length = min(40, 48 - len(prompt))
        assert outputs[request_id].outputs[0].token_ids == expected.token_ids[:length]


def counters(engine: Engine) -> dict[str, int]:
    """The counters of what the scheduler could not do as it was asked, as far as they are not 0."""
    names = ("preemptions", "overtakings", "postponed_decodes", "cut_drafts", "queued_forks")
    values = {name: getattr(engine.stats(), f"num_{name}") for name in names}
    return {name: value for name, value in values.items() if value}


def test_what_the_scheduler_could_not_do_is_counted() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine = toy_engine()
    drain_all(engine, [[1, 2]] * 3, long)
    assert counters(engine) == {}

    engine = toy_engine(max_num_seqs=3, max_num_batched_tokens=2)
    drain_all(engine, [[1, 2]] * 3, long)
    assert set(counters(engine)) == {"postponed_decodes"}

    engine = toy_engine(max_num_seqs=3)
    drain_all(engine, [[1, 2], [1, 2]], replace(long, n=2))
    assert counters(engine) == {}, "the second has no room, but nobody overtakes it"
    engine = toy_engine(max_num_seqs=3)
    engine.add_request([1, 2], replace(long, n=2))
    engine.add_request([1, 2], replace(long, n=2))
    drain_all(engine, [[1, 2]], long)
    assert counters(engine) == {"overtakings": 1}

    engine = toy_engine(draft_model=ToyModel(), max_num_seqs=3, max_num_batched_tokens=5, num_speculative_tokens=4)
    drain_all(always_speculate(engine), [[1, 2]] * 3, long)
    assert set(counters(engine)) == {"cut_drafts"}


def drain_all(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    for prompt in prompts:
        engine.add_request(prompt, params)
    drain(engine)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_seed_gives_the_same_text_in_any_company(seed: int) -> None:
    params = SamplingParams(temperature=1.5, top_k=20, top_p=0.95, seed=seed, max_tokens=20, ignore_eos=True)
    alone = complete(toy_engine(), [1, 2, 3], params).outputs[0].token_ids
    engine = toy_engine(max_num_batched_tokens=5, block_size=3)
    for prompt in prompts(4):
        engine.add_request(prompt, SamplingParams(temperature=0.7))
    assert complete(engine, [1, 2, 3], params).outputs[0].token_ids == alone


def test_without_a_seed_texts_differ() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    engine = toy_engine()
    ids = [engine.add_request([1, 2, 3], params) for _ in range(3)]
    outputs = drain(engine)
    assert len({tuple(outputs[i].outputs[0].token_ids) for i in ids}) == 3


def prompt_where(condition: Callable[[list[int]], bool]) -> list[int]:
    """A prompt whose greedy text fulfils a condition."""
    return next([i, j] for i in range(VOCAB_SIZE) for j in range(VOCAB_SIZE) if condition(greedy([i, j], 12)))


def test_eos_ends_the_text_and_is_not_part_of_it() -> None:
    prompt = prompt_where(lambda tokens: tokens[-1] == EOS_ID and 3 < len(tokens) < 12)
    for skip in (True, False):
        params = SamplingParams(temperature=0.0, skip_special_tokens=skip)
        completion = complete(toy_engine(), prompt, params).outputs[0]
        assert completion.token_ids[-1] == EOS_ID
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.text == ToyTokenizer().decode(completion.token_ids[:-1])


def test_ignore_eos() -> None:
    prompt = prompt_where(lambda tokens: tokens[-1] == EOS_ID and 3 < len(tokens) < 12)
    for skip in (True, False):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, skip_special_tokens=skip)
        completion = complete(toy_engine(), prompt, params).outputs[0]
        assert completion.token_ids == greedy(prompt, 12, stop_at_eos=False)
        assert completion.finish_reason == "length"
        assert ("</s>" in completion.text) is not skip


def test_stop_token_ids() -> None:
    prompt = prompt_where(lambda tokens: len(set(tokens)) == 12 and EOS_ID not in tokens)
    expected = greedy(prompt, 12)
    params = SamplingParams(temperature=0.0, stop_token_ids=[expected[5], expected[8]], ignore_eos=True)
    completion = complete(toy_engine(), prompt, params).outputs[0]
    assert completion.token_ids == expected[:6]
    assert completion.text == ToyTokenizer().decode(expected[:5])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[5])


def test_stop_strings_across_tokens_are_cut_and_never_streamed() -> None:
    prompt = prompt_where(lambda tokens: len(tokens) == 12 and max(tokens) < 30)
    text = ToyTokenizer().decode(greedy(prompt, 12))
    stop = text[4:7]  # every token is one letter
    engine = toy_engine()
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=12, stop=["never", stop]))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    completion = outputs[-1].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert "".join(output.outputs[0].delta for output in outputs) == completion.text


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_deltas_join_to_the_text_even_with_half_characters(max_tokens: int) -> None:
    prompt = prompt_where(lambda tokens: len(tokens) == 12 and {30, 31} <= set(tokens))
    engine = toy_engine()
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, max_tokens + 1))
    assert outputs[-1].outputs[0].text == ToyTokenizer().decode(greedy(prompt, max_tokens))
    assert "".join(output.outputs[0].delta for output in outputs) == outputs[-1].outputs[0].text
    assert [output.finished for output in outputs] == [False] * (max_tokens - 1) + [True]


@pytest.mark.parametrize("length", [1, MAX_POSITION - 2, MAX_POSITION - 1])
def test_the_context_ends_the_text(length: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    completion = complete(toy_engine(block_size=5), [3] * length, params).outputs[0]
    assert len(completion.token_ids) == MAX_POSITION - length
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("count", [0, 1, 3, 20])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_logprobs(count: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=8, logprobs=count, seed=1, ignore_eos=True)
    engine = toy_engine()
    engine.add_request([9], GREEDY)  # a neighbour that asks for none
    completion = complete(engine, [1, 2], params).outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 8
    for index, (token_id, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        expected = torch.log_softmax(logits_of([1, 2, *completion.token_ids[:index]]), dim=-1)
        order = expected.argsort(descending=True).tolist()
        assert set(entries) == {token_id, *order[:count]}
        for candidate, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[candidate].item(), abs=1e-5)
            assert entry.rank == order.index(candidate) + 1
            assert entry.decoded_token == ToyTokenizer().decode([candidate], skip_special_tokens=False)


def test_no_logprobs_unless_asked_for() -> None:
    assert complete(toy_engine(), [1], GREEDY).outputs[0].logprobs is None


def test_abort_frees_at_once_and_only_once() -> None:
    engine = toy_engine(max_num_seqs=1)
    running = engine.add_request([1] * 40, GREEDY)
    waiting = engine.add_request([2], GREEDY)
    engine.step()
    assert engine.stats().num_used_blocks > 0
    for request_id in (running, waiting):
        output = engine.abort(request_id)
        assert output is not None
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert engine.abort(request_id) is None
    assert engine.abort("never heard of") is None
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not engine.has_unfinished
    assert engine.step() == []


def test_an_error_in_one_request_ends_that_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    good = engine.add_request([1, 2, 3], GREEDY)
    bad = engine.add_request([4, 5], GREEDY)

    def broken(token_id: int) -> None:
        raise ValueError("no text for this token")

    [completion] = engine.requests.active[bad]._completions.values()
    monkeypatch.setattr(completion._stream, "add", broken)
    outputs = drain(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert outputs[bad].outputs[0].stop_reason == "ValueError: no text for this token"
    assert outputs[good].outputs[0].token_ids == greedy([1, 2, 3], 12)
    assert engine.stats().num_used_blocks == 0


def test_a_failing_model_raises_and_moves_nobody() -> None:
    engine = toy_engine(max_num_batched_tokens=4)
    request_id = engine.add_request([1, 2, 3, 4, 5, 6], GREEDY)
    engine.step()
    engine.model.fail = True  # type: ignore[attr-defined]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the model broke"):
            engine.step()
    check_blocks(engine)
    engine.model.fail = False  # type: ignore[attr-defined]
    assert drain(engine)[request_id].outputs[0].token_ids == greedy([1, 2, 3, 4, 5, 6], 12)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt must have at least 1 token, got 0"),
        ([1] * MAX_POSITION, f"prompt must be shorter than max_model_len={MAX_POSITION} tokens, got {MAX_POSITION}"),
        ([1, VOCAB_SIZE], f"prompt_token_ids must be an integer in 0..{VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ([-1], f"prompt_token_ids must be an integer in 0..{VOCAB_SIZE - 1}, got -1"),
        ([1.0], f"prompt_token_ids must be an integer in 0..{VOCAB_SIZE - 1}, got 1.0"),
        ([True], f"prompt_token_ids must be an integer in 0..{VOCAB_SIZE - 1}, got True"),
        ("text", "prompt_token_ids must be a list, got str"),
        (None, "prompt_token_ids must be a list, got NoneType"),
    ],
)
def test_prompts_that_can_never_be_served(prompt: list[int], message: str) -> None:
    engine = toy_engine()
    with pytest.raises(RequestError) as error:
        engine.add_request(prompt, GREEDY)
    assert str(error.value) == message
    assert not engine.has_unfinished


def test_request_ids() -> None:
    engine = toy_engine()
    assert engine.add_request([1], GREEDY, request_id="mine") == "mine"
    with pytest.raises(RequestError, match="request_id must be new, got 'mine'"):
        engine.add_request([1], GREEDY, request_id="mine")
    assert engine.add_request([1], GREEDY) != engine.add_request([1], GREEDY)
    drain(engine)
    engine.add_request([1], GREEDY, request_id="mine")


def test_numbered_ids_avoid_those_that_users_chose() -> None:
    engine = toy_engine()
    for name in ("request-0", "request-2"):
        engine.add_request([1], GREEDY, request_id=name)
    assert [engine.add_request([1], GREEDY) for _ in range(2)] == ["request-1", "request-3"]


def test_the_urgent_one_and_the_salted_one() -> None:
    engine = toy_engine(max_num_seqs=1, block_size=2)
    engine.add_request([1] * 9, GREEDY, request_id="later", priority=1)
    engine.add_request([1] * 9, GREEDY, request_id="salted", cache_salt="a")
    outputs = drain(engine)
    assert list(outputs) == ["salted", "later"]
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 0]
    engine.add_request([1] * 9, GREEDY, request_id="salted", cache_salt="a")
    assert drain(engine)["salted"].num_cached_tokens == 8


def test_metrics_are_in_order() -> None:
    engine = toy_engine(max_num_batched_tokens=2)
    engine.add_request([1] * 6, GREEDY)
    assert engine.step() == []
    output = drain(engine)["request-0"]
    metrics = output.metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finish_time]
    assert None not in times
    assert times == sorted(set(times))  # type: ignore[type-var]
    assert metrics.queue_time == times[1] - times[0]  # type: ignore[operator]


def test_beams_have_metrics_too() -> None:
    engine = toy_engine(max_num_batched_tokens=2)
    engine.add_beam_request([1] * 6, BeamSearchParams(beam_width=2, max_tokens=4))
    metrics = drain(engine)["request-0"].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finish_time]
    assert times == sorted(set(times))


def test_a_request_that_waits_has_no_queue_time_yet() -> None:
    engine = toy_engine(max_num_seqs=1)
    engine.add_request([1], GREEDY)
    waiting = engine.add_request([2], GREEDY)
    engine.step()
    output = engine.abort(waiting)
    assert output is not None
    assert output.metrics.queue_time is None  # type: ignore[union-attr]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1, 2**63, 1.0, True, "1"])
def test_limits_out_of_range(field: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be "):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": MAX_POSITION + 1}, f"max_model_len must be at most the model's {MAX_POSITION}, got 97"),
        ({"max_model_len": 96, "num_kv_blocks": 2}, "max_model_len=96 needs a KV cache of 1536 bytes, got 1024"),
        ({"max_model_len": 96, "kv_cache_memory": 1535}, "max_model_len=96 needs a KV cache of 1536 bytes, got 1024"),
        ({"kv_cache_memory": 10}, "one block needs a KV cache of 512 bytes, got 0"),
        ({"kv_cache_memory": 2**62}, "the KV cache must fit into the"),
        ({"num_kv_blocks": 2**50}, "the KV cache must fit into the"),
    ],
)
def test_a_cache_that_does_not_fit(limits: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError) as error:
        toy_engine(**limits)
    assert str(error.value).startswith(message)


def test_the_cache_limits_the_context() -> None:
    engine = toy_engine(num_kv_blocks=2)
    assert engine.max_model_len == 2 * engine.config.block_size
    with pytest.raises(RequestError, match=f"max_model_len={engine.max_model_len} tokens"):
        engine.add_request([1] * engine.max_model_len)


def test_cache_size_follows_the_limits() -> None:
    assert toy_engine(kv_cache_memory=5000).block_manager.num_blocks == 5000 // 512
    assert toy_engine(num_kv_blocks=7).block_manager.num_blocks == 7
    assert toy_engine(max_num_seqs=4, max_model_len=33).block_manager.num_blocks == 4 * 2
