"""Slots for states: who holds which, what the prefix cache finds, and what models with states do not support."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import PaddedToy, use_fakes, use_graphs
from support.kv_files import kv_files, wait_for_files
from support.state_toy import StateToy
from support.toy import VOCAB_SIZE, ToyModel, always_speculate, check_blocks, drain, greedy, prompts, toy_engine
from torch import Tensor

from fastinfer.engine import kv_cache_size as kv_cache_size_module
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size
from fastinfer.engine.engine import Engine
from fastinfer.engine.kv_cache_size import choose_kv_cache_size
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.state_manager import StateManager
from fastinfer.errors import RequestError
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.state_cache import StateCache, state_bytes
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

BLOCK_SIZE = 4
LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SHORT = replace(LONG, max_tokens=1)
STEM = [(5 * i + 1) % VOCAB_SIZE for i in range(18)]


def state_engine(
    monkeypatch: pytest.MonkeyPatch, num_states: int, model: type[StateToy] = StateToy, **limits: Any
) -> Engine:
    monkeypatch.setattr(kv_cache_size_module, "_num_states", lambda *args: num_states)
    return toy_engine(model=model(), **{"block_size": BLOCK_SIZE, "num_kv_blocks": 200, **limits})


def complete(engine: Engine, prompt: list[int], params: SamplingParams = SHORT) -> int:
    """Check a request's text, and return how many of its tokens the prefix cache held."""
    before = engine.stats().num_hit_tokens
    request_id = engine.add_request(prompt, params)
    output = drain(engine)[request_id]
    assert output.outputs[0].token_ids == greedy(prompt, params.max_tokens or 0, stop_at_eos=False)
    check_blocks(engine)
    return engine.stats().num_hit_tokens - before


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_states", [1, 2, 3, 5, 20])
def test_texts_with_few_slots(num_states: int, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, num_states, max_num_seqs=6, async_scheduling=async_scheduling)
    for _ in range(2):
        ids = [engine.add_request(prompt, replace(LONG, n=2)) for prompt in prompts(8)]
        beams = engine.add_beam_request(STEM, BeamSearchParams(3, max_tokens=6))
        outputs = drain(engine)
        for request_id, prompt in zip(ids, prompts(8), strict=True):
            assert {tuple(c.token_ids) for c in outputs[request_id].outputs} == {
                tuple(greedy(prompt, 20, stop_at_eos=False))
            }
        assert len(outputs[beams].outputs) == 3
        check_blocks(engine)
    assert (engine.stats().num_preemptions > 0) == (num_states < 6)
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.num_available == num_states


class PaddedStateToy(PaddedToy, StateToy):
    """Takes padded steps, whose padding reads and writes no states."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        assert batch.state_reads is not None
        assert batch.state_writes is not None
        assert (batch.state_writes[int(batch.query_start[-1]) :] == -1).all()
        assert (batch.state_reads[batch.query_start.diff() == 0] == -1).all()
        return super().forward(batch, kv_cache)


@pytest.mark.parametrize("drafts", [0, 3])
def test_padded_steps_on_a_device(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    limits: dict[str, Any] = {"num_speculative_tokens": drafts, "async_scheduling": True}
    engine = use_graphs(state_engine(monkeypatch, 40, PaddedStateToy, max_num_seqs=6, **limits))
    if drafts:
        always_speculate(engine)
    for _ in range(2):
        ids = [engine.add_request(prompt, LONG) for prompt in prompts(8)]
        outputs = drain(engine)
        assert [outputs[i].outputs[0].token_ids for i in ids] == [
            greedy(prompt, 20, stop_at_eos=False) for prompt in prompts(8)
        ]
        check_blocks(engine)
    assert engine.stats().num_hit_tokens > 50


@pytest.mark.parametrize("length", range(1, 18))
def test_the_same_prompt_again_is_found_up_to_its_last_border(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 8)
    assert complete(engine, STEM[:length]) == 0
    assert complete(engine, STEM[:length]) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("num_batched", [1, 3, 4, 7, 64])
def test_a_common_beginning_is_found_from_the_third_prompt_on(
    num_batched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one learns where they differ; after the first, there is a snapshot at its own end alone."""
    engine = state_engine(monkeypatch, 16, max_num_batched_tokens=num_batched, max_num_seqs=1)
    common = STEM[:9]
    assert complete(engine, [*common, *range(20, 30)]) == 0
    assert complete(engine, [*common, *range(30, 40)]) == 0
    assert complete(engine, [*common, *range(40, 50)]) == 8
    assert complete(engine, [*common, *range(30, 40)]) == 16


def test_the_next_turn_of_a_chat_finds_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 16)
    complete(engine, STEM[:6], LONG)
    text = STEM[:6] + greedy(STEM[:6], 20, stop_at_eos=False)
    assert complete(engine, [*text, 1, 2, 3]) == 24  # of 25 computed tokens


def test_a_sequence_leaves_few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stays before the last token of its prompt, and one at the end of its newest full block."""
    engine = state_engine(monkeypatch, 16, max_num_batched_tokens=4)
    complete(engine, STEM, replace(LONG, max_tokens=40))
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.pool.num_cached == 2


def chats(engine: Engine, num_chats: int, turns: int, beginning: list[int]) -> list[int]:
    """How many tokens of each turn's prompts the prefix cache held, in chats that take turns."""
    texts = [[*beginning, *[chat + 50] * 5] for chat in range(num_chats)]
    hits = []
    for turn in range(turns):
        found = 0
        for chat, text in enumerate(texts):
            found += complete(engine, text, LONG)
            texts[chat] = [*text, *greedy(text, 20, stop_at_eos=False), turn, chat]
        hits.append(found)
    return hits


def test_chats_in_turns_find_their_last_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves two snapshots a turn; with those of all its earlier turns and of its prompt the slots are too few."""
    engine = state_engine(monkeypatch, 12, max_num_seqs=1, num_kv_blocks=1000)
    # 5, 27 and 49 tokens, of whose text all tokens but the last generated one were computed.
    assert chats(engine, 8, 4, []) == [0, 8 * 24, 8 * 44, 8 * 68]


def test_a_beginning_that_several_texts_have_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each of them leaves later snapshots."""
    engine = state_engine(monkeypatch, 12, max_num_seqs=1, num_kv_blocks=1000)
    found = [complete(engine, [*STEM, *[other + 30] * 9], LONG) for other in range(20)]
    assert found == [0, 0, *[16] * 18]
    assert chats(engine, 8, 3, STEM) == [8 * 16, 8 * 40, 8 * 64]


def test_a_snapshot_is_outdated_once_its_text_goes_on_and_no_more_once_another_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = state_engine(monkeypatch, 6, max_num_seqs=1)
    text = STEM[:6] + greedy(STEM[:6], 20, stop_at_eos=False)
    complete(engine, STEM[:6], LONG)
    assert complete(engine, [*text, 1, 2]) == complete(engine, [*text, 3, 4]) == 24
    for other in range(4):  # as many as drop all that is outdated
        complete(engine, [30 + other] * 9)
        assert complete(engine, [*text, 5, other]) == 24


def test_the_newest_outdated_snapshots_stay_for_the_same_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 16, max_num_seqs=1)
    for other in range(12):
        complete(engine, [20 + other] * 9)
    complete(engine, STEM[:9])
    assert complete(engine, [*STEM[:9], *greedy(STEM[:9], 1, stop_at_eos=False), 1, 2, 3]) == 8
    for other in range(12, 16):  # they take the slots of older prompts
        complete(engine, [20 + other] * 9)
    assert complete(engine, [20] * 9) == 0
    assert complete(engine, STEM[:9]) == 8


def test_a_snapshot_without_its_blocks_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 8)
    complete(engine, STEM)
    engine.block_manager.pools[0].forget_contents()
    assert complete(engine, STEM) == 0


def test_without_a_prefix_cache_there_are_no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 8, enable_prefix_caching=False)
    assert complete(engine, STEM, LONG) == complete(engine, STEM, LONG) == 0
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.pool.num_free == 8


@pytest.mark.parametrize(("length", "steps"), [(1, 2), (2, 2), (6, 8), (7, 3)])
def test_a_prompt_that_ends_within_a_block_leaves_no_snapshot_there(
    length: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed again as after an error, it ends within a chunk, too."""
    engine, prompt = state_engine(monkeypatch, 8), STEM[:length]
    request_id = engine.add_request(prompt, LONG)
    for _ in range(steps):
        engine.step()
    engine.requests.repair()
    engine.block_manager.reset_prefix_cache()
    text = drain(engine)[request_id].outputs[0].token_ids
    assert text == greedy(prompt, 20, stop_at_eos=False)
    for end in range(1, 20):
        complete(engine, prompt + text[:end])


def test_a_reset_of_the_prefix_cache_forgets_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 8)
    complete(engine, STEM)
    engine.block_manager.reset_prefix_cache()
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.pool.num_free == 8
    assert complete(engine, STEM) == 0


@pytest.mark.parametrize("length", [7, 8, 9])
def test_pinned_prompts_keep_their_snapshots(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 4)
    engine.pin_prompt("a", STEM[:length])
    drain(engine)
    for other in range(6):  # as many texts as would evict any other snapshot
        complete(engine, [30 + other] * 9)
    assert complete(engine, STEM[:16]) == length // BLOCK_SIZE * BLOCK_SIZE
    with pytest.raises(RequestError, match="must leave a slot for states, got 2 prompts"):
        engine.pin_prompt("b", [3] * 9)
    engine.sleep(1)
    engine.wake_up()
    check_blocks(engine)
    assert complete(engine, [*STEM[:length], 1, 2]) == length // BLOCK_SIZE * BLOCK_SIZE
    engine.unpin_prompt("a")
    assert engine.block_manager.num_used == 0
    assert engine.block_manager.states is not None
    assert engine.block_manager.states.num_available == 4


def test_a_pinned_prompt_keeps_a_snapshot_that_its_sequence_would_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = state_engine(monkeypatch, 8)
    text = STEM[:6] + greedy(STEM[:6], 20, stop_at_eos=False)
    engine.add_request(STEM[:6], LONG)
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_computed_tokens < 13:
        engine.step()
    engine.pin_prompt("a", text[:13])
    before = engine.stats().num_hit_tokens
    drain(engine)
    assert engine.stats().num_hit_tokens - before == 12
    assert complete(engine, [*text[:13], 60, 61]) == 12


CONFIG = ModelConfig(
    architecture="random",
    hidden_size=64,
    intermediate_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rotary_dim=32,
    vocab_size=VOCAB_SIZE,
    max_position=512,
    norm_eps=1e-5,
    state_layers=(True, True, True, False),
    states=LinearAttentionConfig(2, 4, 16, 32, 4),
)
SLOT = 3 * (3 * (2 * 2 * 16 + 4 * 32) * 4 + 4 * 16 * 32 * 4)
TOKEN = 2 * 32 * 2  # bytes of the keys and values of the only layer that has any, in bf16


@pytest.mark.parametrize(("caching", "drafts", "slots"), [(True, 0, 16), (False, 0, 8), (True, 3, 40)])
def test_size(caching: bool, drafts: int, slots: int) -> None:
    config = EngineConfig(
        max_num_seqs=8, num_kv_blocks=32, enable_prefix_caching=caching, num_speculative_tokens=drafts
    )
    size = kv_cache_size(config, [CONFIG])
    assert size.num_states == slots
    assert size.num_bytes == slots * SLOT + 32 * 32 * TOKEN
    cache = KVCache.of_model(CONFIG, size.num_blocks, 32, torch.bfloat16, "cpu", num_states=size.num_states)
    assert size.num_bytes == sum(tensor.nbytes for layer in cache for tensor in layer.tensors)
    assert [isinstance(layer, StateCache) for layer in cache] == [True, True, True, False]
    assert state_bytes(CONFIG.states) == SLOT // 3  # type: ignore[arg-type]


def test_states_take_at_most_half_of_the_memory() -> None:
    config = EngineConfig(max_num_seqs=64, max_model_len=128, kv_cache_memory=20 * SLOT)
    size = kv_cache_size(config, [CONFIG])
    assert size.num_states == 10
    assert 20 * SLOT - 32 * TOKEN < size.num_bytes <= 20 * SLOT
    with pytest.raises(RequestError, match=f"needs a KV cache of {SLOT + 4 * 32 * TOKEN} bytes"):
        kv_cache_size(replace(config, kv_cache_memory=SLOT + 3 * 32 * TOKEN), [CONFIG])
    assert choose_kv_cache_size(config, 512, {0: TOKEN}).num_states == 0


@pytest.mark.parametrize("num_batched", [4, 64])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_snapshots_return_from_the_stores(
    store: str, num_batched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two slots and few blocks nothing stays in the cache; a long prefix is loaded in several steps."""
    limits: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_batched_tokens": num_batched}
    limits |= {"kv_offloading_size": 1e-3} if store == "host" else {"kv_offloading_dir": tmp_path}
    engine = state_engine(monkeypatch, 2, max_num_seqs=1, **limits)
    texts = [[other, *STEM[:17]] for other in range(8)]
    for text in texts:
        complete(engine, text, LONG)
    if store == "disk":
        assert engine.offloading is not None
        assert engine.offloading.disk is not None
        wait_for_files(engine.offloading.disk)
        engine = state_engine(monkeypatch, 2, max_num_seqs=1, **limits)
    for text in texts:
        before = engine.stats().num_prompt_tokens
        complete(engine, text)
        assert engine.stats().num_prompt_tokens - before == len(text) - 16
        turn = [*text, *greedy(text, 20, stop_at_eos=False), 1]
        before = engine.stats().num_prompt_tokens
        complete(engine, turn)
        assert engine.stats().num_prompt_tokens - before == len(turn) - 36
        check_blocks(engine)


def test_a_snapshot_returns_to_blocks_that_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shared, and nothing is loaded but the snapshot."""
    engine = state_engine(monkeypatch, 2, max_num_seqs=1, kv_offloading_size=1e-3)
    texts = [[other, *STEM[:17]] for other in range(8)]
    for text in texts:
        complete(engine, text)
    for text in texts:
        assert complete(engine, text) == 16
    assert engine.stats().num_loaded_host_blocks == len(texts)


@pytest.mark.parametrize("missing", ["block", "snapshot"])
def test_what_the_store_has_lost_is_computed_again(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = state_engine(monkeypatch, 8, kv_offloading_dir=tmp_path)
    complete(engine, STEM[:10])  # whose last snapshot is after 8 tokens
    complete(engine, STEM)
    assert engine.offloading is not None
    assert engine.offloading.disk is not None
    wait_for_files(engine.offloading.disk)
    sizes = {file: file.stat().st_size for file in kv_files(tmp_path)}
    block_size = min(sizes.values())
    lost = [file for file, size in sizes.items() if (size == block_size) == (missing == "block")]
    for file in lost:
        content = file.read_bytes()
        file.unlink()
        engine = state_engine(monkeypatch, 8, kv_offloading_dir=tmp_path)
        complete(engine, STEM)
        computed = engine.stats().num_prompt_tokens
        assert computed in (len(STEM) - 16, len(STEM) - 8, len(STEM))
        wait_for_files(engine.offloading.disk)
        file.write_bytes(content)
    engine = state_engine(monkeypatch, 8, kv_offloading_dir=tmp_path)
    for file in lost:
        file.unlink()
    complete(engine, STEM)
    assert engine.stats().num_prompt_tokens == len(STEM)


def test_a_draft_model_with_states_is_refused() -> None:
    with pytest.raises(RequestError, match="the draft model must have full attention in all layers"):
        toy_engine(draft_model=StateToy(), model=ToyModel(), num_speculative_tokens=2)


def test_a_snapshot_that_could_not_be_written_is_not_found() -> None:
    content = BlockContent(bytes(32), bytes(16))
    states = StateManager(2, 4, enable_prefix_caching=True)

    def write(slot: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        states.add_snapshot(content, write)
    assert not states.has_snapshot(content)
    states.add_snapshot(content, lambda slot: None)
    assert states.has_snapshot(content)
