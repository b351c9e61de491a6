"""How decode steps become CUDA graphs, with fakes that repeat calls: which are captured, and which step takes which."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.fake_cuda_graph import FakeGraph, use_fakes, with_twin

from fastinfer.engine import cuda_graphs
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.block_table import BlockTable
from fastinfer.engine.cuda_graphs import MAX_CAPTURED_TOKENS, CUDAGraphs, bucket_sizes
from fastinfer.engine.scheduler import Chunk
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


def sizes_only(batch: Any) -> StepResult:
    """The results are the numbers of tokens and rows of logits."""
    tokens, rows = len(batch.token_ids), len(batch.logits_indices)
    return StepResult(
        torch.full((tokens, 2), float(tokens)),
        torch.full((rows, 5), float(rows), dtype=torch.bfloat16),
        sampling=None,  # type: ignore[arg-type]  # the graphs know their own
    )


def test_bucket_sizes() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_captures_the_largest_first_with_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    def bar(sizes: list[BatchSize], **options: Any) -> list[BatchSize]:
        bars.append((sizes, options))
        return sizes

    monkeypatch.setattr(cuda_graphs, "tqdm", bar)
    graphs = CUDAGraphs(sizes_only, inputs_of(12, 100), with_adapters=True)
    [(sizes, options)] = bars
    assert options["desc"] == "capturing CUDA graphs"
    keys = [(size.num_tokens, size.has_adapters) for size in sizes]
    assert keys == list(graphs._graphs) == [(n, adapters) for n in (12, 8, 4, 2, 1) for adapters in (False, True)]
    assert all(size.num_seqs == size.num_logits == size.num_tokens for size in sizes)
    assert [graph.given_pool for graph in graphs._graphs.values()] == [None, *["pool"] * 9]  # type: ignore[attr-defined]


def test_a_capture_that_fails_disables_its_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(step: Any, pool: object) -> FakeGraph:
        graph = FakeGraph(step, pool)
        captured.append(graph)
        if len(captured) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return graph

    captured: list[FakeGraph] = []
    monkeypatch.setattr(cuda_graphs, "capture", fails_once)
    inputs = inputs_of(8, 100)
    with pytest.warns(UserWarning, match="run operator by operator, which is slower: operation not permitted"):
        graphs = CUDAGraphs(sizes_only, inputs, with_adapters=False)
    assert graphs.failed == {(2, False)}
    for count, has_graph in ((1, True), (2, False), (3, True), (8, True)):
        assert (graphs.run(BatchSize(count, count, count, False), is_decode=True) is not None) == has_graph


@pytest.mark.parametrize(
    ("max_seqs", "max_tokens", "largest"),
    [(6, 100, 6), (100, 20, 20), (1000, 1000, MAX_CAPTURED_TOKENS)],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(max_seqs: int, max_tokens: int, largest: int) -> None:
    graphs = CUDAGraphs(sizes_only, inputs_of(max_seqs, max_tokens), with_adapters=False)
    assert graphs._buckets[-1] == largest

    def bucket(tokens: int, rows: int, decodes: bool = True) -> float | None:
        result = graphs.run(BatchSize(1, tokens, rows, False), decodes)
        if result is None:
            return None
        assert result.hidden.shape == (tokens, 2)
        assert result.logits.shape == (rows, 5)
        assert result.logits.dtype == torch.float32
        return float(result.hidden[0, 0])

    assert [bucket(n, n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 6 if largest == 6 else 8]
    assert bucket(3, 1) == bucket(1, 3) == 4
    assert bucket(largest, 1) == largest
    assert bucket(largest + 1, 1) is None
    assert bucket(2, 2, decodes=False) is None


def test_padding_replaces_all_that_a_longer_step_has_left() -> None:
    inputs = inputs_of(8, 8)
    inputs._host[:] = 0x11
    size = BatchSize(num_seqs=2, num_tokens=3, num_logits=3, has_adapters=True)
    inputs._query_start[:3] = [0, 2, 3]
    inputs.pad(size, 6)
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


def test_a_capture_has_a_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default stream for captures is made once per process, on the GPU that was current then."""
    streams, used = [], []

    class Stream:
        def __init__(self) -> None:
            streams.append(self)

        def wait_stream(self, other: object) -> None: ...

    @contextmanager
    def note(*args: Any, stream: Stream | None = None, **options: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: note(stream=stream))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", note)
    steps: list[int] = []
    real_capture(lambda: steps.append(len(used)), None)
    assert steps == [1, 2], "once before the capture, and once in it"
    assert used == [streams[0]] * 2
