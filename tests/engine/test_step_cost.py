"""What a step does must not grow with the length of its sequences: lines of Python and bytes of memory are counted."""

import gc
import statistics
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.blocks import block_manager
from support.flat_model import flat_engine
from support.toy import always_speculate

import fastinfer
from fastinfer.engine import ngram_index, offloaded_cache
from fastinfer.engine.adapter_queue import AdapterQueue
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.block_store import HostBlockStore
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.engine import Engine
from fastinfer.engine.grammar import GrammarCompiler
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.state_manager import StateManager
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

PACKAGE = str(Path(fastinfer.__file__).parent)
LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Cost(NamedTuple):
    """What a call does: lines of the package that run, and the largest number of bytes in use above those before."""

    lines: int
    num_bytes: int


def cost_of(call: Callable[[], Any], within: str = PACKAGE) -> Cost:
    """The cost of a call, of whose lines only those in files whose paths begin with ``within`` are counted."""
    lines = 0

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return count if frame.f_code.co_filename.startswith(within) else None

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(enter)
    tracemalloc.start()
    try:
        in_use, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        sys.settrace(before)
    return Cost(lines, peak - in_use)


def typical_cost(call: Callable[[], Any]) -> Cost:
    """The median of each part: a list or table that grows at its end is copied now and then.

    Python keeps small objects that were freed, and takes new ones from there without an allocation. How many of them
    there are depends on everything that ran before; a full collection drops them all.
    """
    costs = []
    gc.freeze()  # older objects are not collected, so that this takes no time
    try:
        for _ in range(9):
            gc.collect()
            costs.append(cost_of(call))
    finally:
        gc.unfreeze()
    return Cost(*(int(statistics.median(part)) for part in zip(*costs, strict=True)))


def assert_same(short: Cost, long: Cost, length: int) -> None:
    """The cost at two lengths that differ by ``length`` tokens: a list of these alone would be 8 bytes each."""
    assert abs(long.lines - short.lines) < 100, (short, long)
    assert long.num_bytes - short.num_bytes < 2 * length, (short, long)


@pytest.mark.parametrize("draft", [None, "ngram", "draft model"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"frequency_penalty": 0.1, "repetition_penalty": 1.1},
        {"output_kind": RequestOutputKind.DELTA, "logprobs": 0},
        {"output_kind": RequestOutputKind.FINAL_ONLY},
        {"n": 2, "stop": ["never", "again"], "min_tokens": 5000},
    ],
    ids=["plain", "logprobs", "penalties", "delta", "final", "several"],
)
def test_generated_tokens(fields: dict[str, Any], draft: str | None) -> None:
    drafts = {} if draft is None else {"num_speculative_tokens": 2}
    engine = flat_engine(
        draft == "draft model", max_num_seqs=4, num_kv_blocks=800, max_model_len=6000, block_size=16, **drafts
    )
    if draft:
        always_speculate(engine)
    for index in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=5000, ignore_eos=True, **fields)
        engine.add_request([1 + index, 2, 3], params)

    def run_to(length: int) -> Cost:
        while len(engine.scheduler.running[0] if engine.scheduler.running else ()) < length:
            engine.step()
        return typical_cost(engine.step)

    engine.step()
    assert_same(run_to(300), run_to(2300), 2000)


def test_the_counts_see_a_copy() -> None:
    """The checks above would fail for a step that copies its tokens, or walks them."""
    tokens = list(range(2300))
    for kind in (list, partial(array, "i")):
        short, long = (typical_cost(lambda kind=kind, n=n: kind(tokens[:n])) for n in (300, 2300))
        with pytest.raises(AssertionError):
            assert_same(short, long, 2000)
    manager = block_manager(1000, 4)
    short, long = (cost_of(lambda n=n: [manager.pools[0].take() for _ in range(n)]) for n in (10, 110))
    with pytest.raises(AssertionError):
        assert_same(short, long, 100_000)


def test_statistics() -> None:
    """``AsyncEngine`` asks for them after every step."""

    def cost(num_tokens: int) -> Cost:
        engine = flat_engine(max_num_seqs=1, num_kv_blocks=1000, max_num_batched_tokens=30_000, max_model_len=30_000)
        engine.add_request([1] * num_tokens, LONG)
        engine.step()
        assert engine.stats().num_used_blocks >= num_tokens // 32
        return typical_cost(engine.stats)

    assert_same(cost(2000), cost(20_000), 18_000 // 32)


def test_an_unread_output_costs_nothing_until_it_is_read() -> None:
    engine = flat_engine(max_num_seqs=1, num_kv_blocks=200, max_model_len=6000)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5000, logprobs=0, ignore_eos=True))
    kept: list[RequestOutput] = []
    while engine.has_unfinished:
        kept += engine.step()
    assert len(kept) == 5000
    for index in (0, 1, 77, 2048, 4999):
        completion = kept[index].outputs[0]
        assert completion.token_ids == kept[-1].outputs[0].token_ids[: index + 1]
        assert len(completion.logprobs or ()) == index + 1
        assert kept[-1].outputs[0].text.startswith(completion.text)
    assert kept[2048].outputs[0].text == kept[2047].outputs[0].text + kept[2048].outputs[0].delta


def hold_back(num_tokens: int, *, shared: bool) -> Engine:
    """A long prompt that waits for room while others decode; a running sequence may hold its prefix."""
    blocks = num_tokens // 32 + 40
    engine = flat_engine(max_num_seqs=8, num_kv_blocks=blocks, max_model_len=num_tokens + 600)
    prompt = [1 + 7 * i % 60 for i in range(num_tokens)]
    holder = prompt if shared else [60, *prompt[1:]]
    engine.add_request(holder, LONG)
    while not engine.scheduler.running or not engine.scheduler.running[0].is_decoding:
        engine.step()
    for index in range(3):
        engine.add_request([61, 1 + index], LONG)
    for _ in range(3):
        engine.step()
    # Without its prefix in use the prompt has no room; with it, what follows has none.
    rest = [1] * (500 if shared else 0)
    while engine.block_manager.can_allocate(engine.scheduler.running[0], spare=0):
        engine.block_manager.pools[0].take()
    engine.add_request([*prompt, *rest], LONG)
    engine.step()
    assert len(engine.scheduler.waiting) == 1
    return engine


@pytest.mark.parametrize("shared", [False, True])
def test_a_waiting_prompt(shared: bool) -> None:
    short, long = (typical_cost(hold_back(length, shared=shared).step) for length in (2000, 20_000))
    assert_same(short, long, 18_000 // 32)


def hold_prefix(num_tokens: int, kind: str) -> tuple[BlockManager, Sequence]:
    """A prompt whose keys and values a running sequence holds, but not what else a prefix needs.

    The model has states, whose snapshots are behind the prefix, or a window, whose blocks there are gone. The prompt
    has room only if it shares its prefix.
    """
    states = StateManager(8, 4, enable_prefix_caching=True) if kind == "states" else None
    pools = [BlockPool(num_tokens // 4 + 60), *([] if states else [BlockPool(14, 16)])]
    manager = BlockManager(pools, 4, states=states)
    prompt = [1 + 7 * i % 60 for i in range(num_tokens)]
    holder = Sequence("holder", prompt + [61] * 80, SamplingParams(), 0)
    manager.allocate(holder)
    while holder.num_uncomputed_tokens:
        manager.extend(holder, holder.num_computed_tokens + 4, 0)
        chunk = Chunk(holder, 4)
        manager.place_states([chunk])
        holder.num_computed_tokens += 4
        manager.advance_states(chunk)
        manager.end_step(holder)
    return manager, Sequence("waiting", prompt + [62] * 80, SamplingParams(), 0)


def publish(manager: BlockManager, content: BlockContent) -> None:
    """Add a snapshot or a block of the window to the prefix cache."""
    if manager.states is not None:
        manager.states.add_snapshot(content, lambda slot: None)
    else:
        pool = manager.pools[1]
        block = pool.take()
        pool.publish(block, content)
        pool.remove_holder(block)


@pytest.mark.parametrize("kind", ["states", "window"])
def test_a_waiting_prompt_whose_known_prefix_does_not_count_as_computed(kind: str) -> None:
    """Others publish what is no part of the prefix in the meantime."""

    def cost(num_tokens: int) -> Cost:
        manager, waiting = hold_prefix(num_tokens, kind)
        others = iter(range(100))

        def step() -> None:
            publish(manager, BlockContent(bytes([next(others)]) * 32, b""))
            assert not manager.can_allocate(waiting)

        step()
        return typical_cost(step)

    assert_same(cost(2000), cost(20_000), 18_000 // 4)


@pytest.mark.parametrize("kind", ["states", "window"])
def test_a_waiting_prompt_is_admitted_once_its_prefix_counts_as_computed(kind: str) -> None:
    manager, waiting = hold_prefix(400, kind)
    assert not manager.can_allocate(waiting)
    # Of a window, whose blocks before the 90th one a next token sees, the last block to come is the first one.
    for index in [89] if kind == "states" else [89, 88, 87, 86]:
        assert not manager.can_allocate(waiting)
        publish(manager, manager._content(waiting, index))
    assert manager.can_allocate(waiting)
    manager.allocate(waiting)
    assert waiting.num_computed_tokens == 360


def test_an_admitted_prompt_of_a_model_with_states_is_looked_up_in_the_stores_by_bisection() -> None:
    def lines(num_tokens: int) -> int:
        worker: Any = SimpleNamespace(part_bytes=lambda part: 64)
        offloading = KVOffloading([worker], HostBlockStore(1000), None, 8)
        states = StateManager(8, 4, enable_prefix_caching=True)
        manager = BlockManager([BlockPool(num_tokens // 4)], 4, offloading=offloading, states=states)
        prompt = Sequence("prompt", [1 + 7 * i % 60 for i in range(num_tokens)], SamplingParams(), 0)
        return cost_of(lambda: manager.allocate(prompt), offloaded_cache.__file__).lines

    assert 0 < lines(40_000) < 2 * lines(4_000)


def test_the_ngram_index_of_a_prompt_is_built_over_several_steps() -> None:
    def most_lines(num_tokens: int) -> int:
        engine = flat_engine(max_num_seqs=4, num_kv_blocks=3000, max_model_len=80_000, num_speculative_tokens=2)
        prompt = [1 + i * i % 61 for i in range(num_tokens)]
        # The first request fills the cache, so that the second one's prompt is computed at once.
        for _ in range(2):
            engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=30))
            engine.step()
            lines = []
            while engine.has_unfinished:
                lines.append(cost_of(engine.step, ngram_index.__file__).lines)
        return max(lines)

    assert 0 < most_lines(40_000) < most_lines(4_000) + 100


@pytest.mark.parametrize("num_running", [0, 1])
def test_requests_that_wait_for_a_grammar(num_running: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCompiler, "submit", lambda compiler, constraint: Future())
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))

    def cost(num_waiting: int) -> Cost:
        engine = flat_engine(max_num_seqs=2, num_kv_blocks=200, max_model_len=6000)
        for _ in range(num_running):
            engine.add_request([1, 2, 3], LONG)
        for _ in range(num_waiting):
            engine.add_request([1, 2], constrained)
        engine.step()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting_tokens) == (num_running, 2 * num_waiting)
        return typical_cost(lambda: (engine.step(), engine.stats()))

    assert_same(cost(10), cost(2000), 2000)


def test_requests_that_wait_for_an_adapter() -> None:
    """Most of them are for one adapter that finds no free slot; one whose adapter has a slot overtakes them."""

    class Adapters:
        def fetch(self, keys: list[str]) -> dict[str, Exception]:
            return {}

        def slot(self, key: str) -> int | None:
            return 0 if key == "loaded" else None

        def is_in_memory(self, key: str) -> bool:
            return True

        def place(self, key: str, slots_in_use: set[int]) -> None:
            return None

    def cost(num_waiting: int) -> Cost:
        queue = AdapterQueue(Adapters(), 64)  # type: ignore[arg-type]
        for index, adapter in enumerate(["other"] * num_waiting + ["loaded"]):
            first = Sequence(str(index), [1, 2], SamplingParams(), 0, adapter_key=adapter)
            queue.add(SimpleNamespace(request_id=str(index), sequences=[first]))  # type: ignore[arg-type]

        def step() -> None:
            [request] = [queue.discard(request.request_id) or request for request, _ in queue.admit(set)]
            assert request.request_id == str(num_waiting)
            assert queue.num_tokens == 2 * len(queue) == 2 * num_waiting

        return cost_of(step)

    assert_same(cost(10), cost(3000), 3000)
