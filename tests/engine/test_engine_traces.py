"""Random traces: requests of all kinds come, are aborted, refused, preempted and finish, in a cache that is mostly too
small. Every text must be what the request alone would give, and every block accounted for in every step."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import VOCAB_SIZE, Forgetful, always_speculate, check_blocks, drain, greedy, toy_engine

from fastinfer.engine.engine import Engine
from fastinfer.errors import QueueFullError
from fastinfer.outputs import PrefillOutput
from fastinfer.sampling_params import SamplingParams

ACTIONS = ["add", "add", "embed", "step", "step", "step", "step", "abort"]


def draw_engine(draw: Any) -> Engine:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(4, 40))
    fewest = -(-max_model_len // block_size)
    speculation = draw(st.sampled_from(["none", "ngram", "draft model"]))
    engine = toy_engine(
        draft_model=Forgetful() if speculation == "draft model" else None,
        num_speculative_tokens=0 if speculation == "none" else draw(st.integers(1, 4)),
        block_size=block_size,
        max_model_len=max_model_len,
        num_kv_blocks=draw(st.integers(fewest, 2 * fewest)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 7, 64])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_waiting=draw(st.integers(1, 8)),
        batching=draw(st.sampled_from(["continuous", "continuous", "static", "dynamic"])),
        max_batch_wait_s=0.001,
        enable_prefix_caching=draw(st.booleans()),
    )
    return engine if speculation == "none" else always_speculate(engine)


@settings(deadline=None, max_examples=500)
@given(data=st.data())
def test_random_traces(data: st.DataObject) -> None:
    draw = data.draw
    engine = draw_engine(draw)
    max_model_len, max_num_seqs = engine.max_model_len, engine.config.max_num_seqs
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=max_model_len - 2))
    added: dict[str, tuple[list[int], int, int]] = {}
    last: dict[str, Any] = {}

    def prompt() -> list[int]:
        """Often one that begins as others do."""
        start = stem[: draw(st.integers(0, len(stem)))]
        return start + draw(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=max_model_len - 1 - len(start))
        )

    for action in draw(st.lists(st.sampled_from(ACTIONS), max_size=60)):
        is_full = engine.stats().num_waiting >= engine.config.max_num_waiting  # more after a preemption
        if action in ("add", "embed") and is_full:
            with pytest.raises(QueueFullError):
                engine.add_request([1])
        elif action == "add":
            tokens, max_tokens = prompt(), draw(st.integers(1, 20))
            params = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, n=draw(st.integers(1, min(3, max_num_seqs)))
            )
            salt, priority = draw(st.sampled_from(["", "", "salt"])), draw(st.sampled_from([0, 0, 0, 1, -1]))
            request_id = engine.add_request(tokens, params, priority=priority, cache_salt=salt)
            added[request_id] = tokens, min(max_tokens, max_model_len - len(tokens)), params.n
        elif action == "embed":
            engine.add_embedding_request(prompt(), pooling=draw(st.sampled_from(["mean", "last"])))
        elif action == "abort" and added:
            request_id = draw(st.sampled_from(sorted(added)))
            output = engine.abort(request_id)
            assert (output is None) == (request_id in last and last[request_id].finished)
            assert engine.abort(request_id) is None
            if output is not None:
                last[request_id] = output
        elif action == "step":
            step(engine, last)
    while engine.has_unfinished:
        step(engine, last)

    for request_id, (tokens, max_tokens, n) in added.items():
        assert len(last[request_id].outputs) == n
        for completion in last[request_id].outputs:
            expected = greedy(tokens, max_tokens)
            aborted = completion.finish_reason == "abort"
            assert completion.token_ids == (expected[: len(completion.token_ids)] if aborted else expected)
    assert engine.block_manager.num_used == 0
    assert engine.block_manager.num_free + engine.block_manager.num_cached == engine.block_manager.num_blocks


def step(engine: Engine, last: dict[str, Any]) -> None:
    """One step, after which the books balance; somebody gets further, unless a batch waits for company."""
    scheduler = engine.scheduler
    before = {s: (len(s), s.num_computed_tokens) for s in scheduler.running}
    outputs = engine.step()
    last.update({output.request_id: output for output in outputs})
    check_blocks(engine)
    assert len({output.request_id for output in outputs}) == len(outputs)
    progress = [s for s in scheduler.running if (len(s), s.num_computed_tokens) > before.get(s, (0, 0))]
    assert outputs or progress or not before, "nobody got further"


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_same_in_any_company(pooling: str) -> None:
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(6)]

    def embed(engine: Engine, prompt: list[int]) -> PrefillOutput:
        request_id = engine.add_embedding_request(prompt, pooling=pooling)
        return drain(engine)[request_id]

    alone = [embed(toy_engine(), prompt).embedding for prompt in prompts]
    engine = toy_engine(block_size=2, num_kv_blocks=26, max_model_len=48, max_num_batched_tokens=5)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(2):
        ids = [engine.add_embedding_request(prompt, pooling=pooling) for prompt in prompts]
        outputs = drain(engine)
        for request_id, expected in zip(ids, alone, strict=True):
            assert outputs[request_id].embedding == pytest.approx(expected, abs=1e-12)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_that_is_preempted_half_way_begins_anew(pooling: str) -> None:
    prompt = list(range(1, 31))
    alone = toy_engine()
    request_id = alone.add_embedding_request(prompt, pooling=pooling)
    expected = drain(alone)[request_id].embedding
    engine = toy_engine(block_size=2, num_kv_blocks=24, max_model_len=48, max_num_batched_tokens=2)
    engine.add_request([1] * 10, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    request_id = engine.add_embedding_request(prompt, pooling=pooling)
    while not engine.stats().num_preemptions:
        engine.step()
    assert drain(engine)[request_id].embedding == pytest.approx(expected, abs=1e-12)
