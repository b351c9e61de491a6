"""How decode steps become CUDA graphs, with fakes that repeat calls: which are captured, and which step takes which."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import FakeGraph, use_fakes, with_twin
from support.mixed_decoder import CONFIG
from torch import Tensor

from fastinfer.cli.launch_plans import GPUS, launch_plan
from fastinfer.engine import cuda_graphs
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize
from fastinfer.engine.block_table import BlockTable
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.cuda_graphs import (
    MAX_CAPTURED_TOKENS,
    MAX_DECODED_TOKENS,
    CUDAGraphs,
    decode_buckets,
    expert_tile_limits,
    prefill_buckets,
)
from fastinfer.engine.sequence import Sequence
from fastinfer.sampling_params import SamplingParams

real_capture = cuda_graphs.capture  # before the fakes take its place


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_fakes(monkeypatch)
    with torch.inference_mode():
        yield


def inputs_of(max_seqs: int, max_tokens: int) -> BatchInputs:
    return with_twin(BatchInputs(max_seqs, max_tokens, max_seqs + max_tokens, max_blocks=3, block_size=4))


def num_tokens(batch: Any) -> Tensor:
    """Hidden states [tokens, 2] that are the number of tokens."""
    return torch.full((len(batch.token_ids), 2), float(len(batch.token_ids)))


def num_rows(hidden: Tensor, batch: Any) -> Tensor:
    """Logits [rows, 5] that are the number of rows, the largest for token 3."""
    logits = torch.full((len(batch.logits_indices), 5), float(len(batch.logits_indices)), dtype=torch.bfloat16)
    logits[:, 3] *= 2
    return logits


def capture_all(inputs: BatchInputs, with_adapters: bool = False) -> CUDAGraphs:
    return CUDAGraphs(num_tokens, num_rows, inputs, [], with_adapters)


def test_buckets_of_decode_steps() -> None:
    assert decode_buckets(1, []) == [1]
    assert decode_buckets(3, []) == [1, 2, 3]
    assert decode_buckets(8, []) == [1, 2, 4, 8]
    assert decode_buckets(30, []) == [1, 2, 4, 8, 16, 24, 30]
    assert decode_buckets(64, []) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_buckets_of_steps_with_prompts() -> None:
    assert prefill_buckets(5, []) == [5]
    assert prefill_buckets(30, []) == [8, 16, 30]
    assert prefill_buckets(64, []) == [8, 16, 32, 64]
    assert prefill_buckets(300, []) == [8, 16, 32, 64, 128, 256, 300]
    assert len(prefill_buckets(MAX_CAPTURED_TOKENS, [])) == 20


@pytest.mark.parametrize(
    "buckets", [decode_buckets(MAX_DECODED_TOKENS, []), prefill_buckets(1000, [])], ids=["decode", "prefill"]
)
def test_a_step_has_the_tiles_of_its_bucket(buckets: list[int]) -> None:
    """The plans of matrix products, whether they cut units or not, are the same for both, so padding changes no sum."""
    for op, gpu, (n, k) in product(("gemm", "int4_gemm", "w8a8_gemm"), GPUS.values(), ((576, 1536), (28672, 4096))):
        plans = [launch_plan(op, {"m": m, "n": n, "k": k}, gpu) for m in range(1, buckets[-1] + 1)]
        assert len({str(plan) for plan in plans}) > 4
        for m, plan in enumerate(plans, 1):
            bucket = next(bucket for bucket in buckets if bucket >= m)
            assert plan == plans[bucket - 1], (op, gpu, n, k, m, bucket)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (60, 4), (64, 6), (128, 8)])
def test_the_experts_of_a_step_have_the_tiles_of_its_bucket(experts: int, chosen: int) -> None:
    """Their tile depends on an even share of the rows, as ``grouped_tokens`` in csrc/gemm/gemm_plan.h chooses it."""

    def tile(tokens: int) -> int:
        share = -(-tokens * chosen // experts)
        return 8 if share <= 8 else 32 if share <= 32 else 128 if share <= 256 else 256

    limits = expert_tile_limits(replace(CONFIG, num_experts=experts, experts_per_token=chosen))
    for buckets in (decode_buckets(256, limits), prefill_buckets(2048, limits)):
        for count in range(1, buckets[-1] + 1):
            assert tile(count) == tile(next(bucket for bucket in buckets if bucket >= count)), count
    assert expert_tile_limits(CONFIG) == []


def test_captures_the_largest_first_with_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    def bar(sizes: list[BatchSize], **options: Any) -> list[BatchSize]:
        bars.append((sizes, options))
        return sizes

    monkeypatch.setattr(cuda_graphs, "tqdm", bar)
    graphs = capture_all(inputs_of(12, 100), with_adapters=True)
    [(sizes, options)] = bars
    assert options["desc"] == "capturing CUDA graphs"
    prefill = [BatchSize(min(n, 12), n, 0, adapters) for n in (100, 64, 32, 16, 8) for adapters in (False, True)]
    decode = [BatchSize(n, n, n, adapters) for n in (12, 8, 4, 2, 1) for adapters in (False, True)]
    assert sizes == list(graphs._graphs) == prefill + decode


def test_graphs_share_memory() -> None:
    """torch reuses what a graph has freed for one of the same pool that was captured on the same stream."""
    graphs: list[Any] = list(capture_all(inputs_of(12, 100))._graphs.values())
    assert [graph.given_pool for graph in graphs] == [None, *["pool"] * 9]
    assert len({graph.given_stream for graph in graphs}) == 1


def test_a_capture_that_fails_disables_its_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(step: Any, stream: object, pool: object) -> FakeGraph:
        graph = FakeGraph(step, stream, pool)
        captured.append(graph)
        if len(captured) in (1, 4):
            raise RuntimeError("operation not permitted when stream is capturing")
        return graph

    captured: list[FakeGraph] = []
    monkeypatch.setattr(cuda_graphs, "capture", fails_once)
    inputs = inputs_of(8, 16)
    with pytest.warns(UserWarning, match="run operator by operator, which is slower: operation not permitted"):
        graphs = capture_all(inputs)
    assert graphs.failed == {BatchSize(8, 16, 0, False), BatchSize(4, 4, 4, False)}

    def bucket(count: int, is_decode: bool) -> float | None:
        result = graphs.run(BatchSize(count, count, count, False), is_decode)
        return None if result is None else float(result.hidden[0, 0])

    assert [bucket(count, True) for count in (1, 2, 3, 8)] == [1, 2, 8, 8], "3 tokens have the graph of a prompt"
    assert [bucket(count, False) for count in (1, 8, 9)] == [8, 8, None]


@pytest.mark.parametrize(
    ("max_seqs", "max_tokens", "largest"),
    [(6, 100, 6), (100, 20, 20), (1000, 1000, MAX_DECODED_TOKENS)],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(max_seqs: int, max_tokens: int, largest: int) -> None:
    graphs = capture_all(inputs_of(max_seqs, max_tokens))
    assert graphs._decode_buckets[-1] == largest

    def bucket(tokens: int, rows: int, decodes: bool = True) -> float | None:
        result = graphs.run(BatchSize(1, tokens, rows, False), decodes)
        if result is None:
            return None
        assert result.hidden.shape == (tokens, 2)
        assert result.logits.shape == (rows, 5)
        if result.tokens is None:  # a step with prompts
            assert (result.logits[:, 2] == rows).all()
            return -float(result.hidden[0, 0])
        assert result.logits.dtype == torch.float32
        assert result.tokens.tolist() == [3] * rows
        return float(result.hidden[0, 0])

    assert [bucket(n, n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 6 if largest == 6 else 8]
    assert bucket(3, 1) == bucket(1, 3) == 4
    assert bucket(largest, 1) == largest
    prefill = prefill_buckets(max_tokens, [])
    assert bucket(2, 2, decodes=False) == bucket(7, 0, decodes=False) == -8
    assert bucket(max_tokens, 1, decodes=False) == -max_tokens
    if largest < max_tokens:
        assert bucket(largest + 1, 1) == -next(n for n in prefill if n > largest)


def test_steps_of_too_many_tokens_run_operator_by_operator() -> None:
    graphs = capture_all(inputs_of(3, MAX_CAPTURED_TOKENS + 1))
    assert graphs.run(BatchSize(1, MAX_CAPTURED_TOKENS, 1, False), is_decode=False) is not None
    assert graphs.run(BatchSize(1, MAX_CAPTURED_TOKENS + 1, 1, False), is_decode=False) is None


def test_padding_replaces_all_that_a_longer_step_has_left() -> None:
    inputs = inputs_of(8, 8)
    inputs._host[:] = 0x11
    size = BatchSize(num_seqs=2, num_tokens=3, num_logits=3, has_adapters=True)
    inputs._query_start[:3] = [0, 2, 3]
    inputs.pad(size, BatchSize(6, 6, 6, True))
    inputs.upload()
    batch = inputs.batch(BatchSize(6, 6, 6, True))
    old = 0x11111111
    assert batch.query_start.tolist() == [0, 2, 3, 3, 3, 3, 3]
    assert batch.seq_lens.tolist() == [old, old, 0, 0, 0, 0]
    assert batch.slot_mappings[0][3:].tolist() == batch.adapter_ids[3:].tolist() == [-1, -1, -1]
    assert batch.logits_indices[3:].tolist() == [0, 0, 0]
    assert batch.token_ids[3:].tolist() == [0, 0, 0]
    assert batch.token_ids[:3].tolist() == batch.positions[3:].tolist() == [0x1111111111111111] * 3
    assert batch.block_tables[0].tolist() == [[0x7F7F7F7F] * 3] * 6, "no sequence has a new block"


def test_padding_of_wanted_rows_replaces_what_a_longer_step_has_left() -> None:
    inputs = with_twin(BatchInputs(8, 8, 8, max_blocks=3, block_size=4, drops_rows=True))
    inputs._host[:] = 0x11
    inputs._last_rows._query_start[:3] = [0, 0, 1]  # type: ignore[union-attr]
    padded = BatchSize(5, 8, 0, True, num_wanted=5)
    inputs.pad(BatchSize(2, 6, 1, True, num_wanted=1), padded)
    inputs.upload()
    last = inputs.batch(padded).last
    assert last is not None
    assert last.query_start.tolist() == [0, 0, 1, 1, 1, 1]
    assert last.rows.tolist() == [0x1111111111111111, 0, 0, 0, 0]
    assert last.adapter_ids is not None
    assert last.adapter_ids.tolist() == [0x11111111, -1, -1, -1, -1]


def test_a_draft_head_has_graphs_from_each_of_its_layers_on() -> None:
    inputs = with_twin(BatchInputs(4, 8, 12, max_blocks=3, block_size=4, head_layers=3))

    def first_layer(batch: Any) -> Tensor:
        return num_tokens(batch) + 10 * batch.features.first_layer

    graphs = CUDAGraphs(first_layer, num_rows, inputs, [], False)
    for layer in (2, 0, 1):
        result = graphs.run(BatchSize(3, 3, 3, False, first_layer=layer), is_decode=True)
        assert result is not None
        assert result.hidden.tolist() == [[4 + 10 * layer] * 2] * 3
    # Only the first draft of a sequence is made together with tokens of prompts.
    assert graphs.run(BatchSize(1, 8, 1, False), is_decode=False) is not None
    assert graphs.run(BatchSize(1, 8, 1, False, first_layer=1), is_decode=False) is None


def test_only_new_entries_of_the_block_tables_are_copied() -> None:
    inputs = with_twin(BatchInputs(3, 16, 19, max_blocks=5, block_size=2, num_groups=2))
    tables = inputs.batch(BatchSize(3, 3, 3, False)).block_tables

    def copied(*rows: tuple[list[int], list[int]]) -> list[list[list[int]]]:
        """The entries that a step with these blocks copies; 0 for the others."""
        for table in tables:
            table.zero_()
        chunks = []
        for row in rows:
            sequence = Sequence("request", list(range(9)), SamplingParams(), 0)
            sequence.block_tables = [BlockTable(blocks) for blocks in row]
            chunks.append(Chunk(sequence, 1))
        inputs.fill(chunks, [])
        inputs.upload()
        return [table.tolist() for table in tables]

    none, first, second = [0] * 5, ([3, 4], [7, 8]), ([5], [9])
    assert copied(first, second) == [[[3, 4, 0, 0, 0], [5, 0, 0, 0, 0], none], [[7, 8, 0, 0, 0], [9, 0, 0, 0, 0], none]]
    assert copied(first, second) == [[none] * 3] * 2
    second[0].append(6)
    assert copied(first, second) == [[none, [0, 6, 0, 0, 0], none], [none] * 3]
    assert copied(second) == [[[5, 6, 0, 0, 0], none, none], [[9, 0, 0, 0, 0], none, none]]
    assert copied(second, first) == [[none, [3, 4, 0, 0, 0], none], [none, [7, 8, 0, 0, 0], none]]


def test_entries_that_could_not_be_copied_are_copied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = with_twin(BatchInputs(1, 4, 5, max_blocks=2, block_size=2))
    sequence = Sequence("request", [1, 2, 3], SamplingParams(), 0)
    sequence.block_tables = [BlockTable([3, 4])]
    inputs.fill([Chunk(sequence, 3)], [])

    def pinned(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.uint8:  # the block tables come after all other inputs
            raise RuntimeError("no memory can be pinned")
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pinned)
        with pytest.raises(RuntimeError, match="no memory can be pinned"):
            inputs.upload()
    inputs.upload()
    assert inputs.batch(BatchSize(1, 3, 0, False)).block_tables[0].tolist() == [[3, 4]]


def test_a_capture_uses_the_given_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default stream for captures is made once per process, on the GPU that was current then."""
    used = []

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    @contextmanager
    def note(*args: Any, stream: Stream | None = None, **options: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: note(stream=stream))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", note)
    steps: list[int] = []
    stream: Any = Stream()
    real_capture(lambda: steps.append(len(used)), stream, None)
    assert steps == [1, 2], "once before the capture, and once in it"
    assert used == [stream] * 2
