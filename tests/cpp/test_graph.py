"""CPUGraph: a replay is bitwise the calls it recorded, and what it would miss is refused."""

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from support.helpers import assert_bitwise, num_threads
from support.op_calls import op_calls
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fastinfer import ops


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def cloned(values: Any) -> Any:
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)


CALLS = [name for name, _ in op_calls()]


@cache
def calls(seed: int) -> list[tuple[str, tuple[Any, ...]]]:
    return list(op_calls(seed=seed))


@pytest.mark.parametrize("index", range(len(CALLS)), ids=lambda index: f"{index}-{CALLS[index]}")
def test_every_operator_replays_on_new_contents(index: int) -> None:
    name, args = copy.deepcopy(calls(1)[index])  # written to, and shared with other calls
    _, others = calls(2)[index]
    operator = getattr(torch.ops.fastinfer, name).default
    graph = ops.CPUGraph()
    expected, eager_args = operator(*(eager_args := cloned(args))), eager_args
    with graph.capture():
        results = operator(*args)
    for result, eager in zip(tensors((results, args)), tensors((expected, eager_args)), strict=True):
        assert_bitwise(result, eager)
    if not len(graph):
        assert name == "paged_attention_plan"  # empty on the CPU
        return
    expected, eager_args = operator(*(eager_args := cloned(others))), eager_args
    for ours, new in zip(tensors(args), tensors(others), strict=True):
        ours.copy_(new)
    for result in tensors(results):
        result.fill_(1)
    graph.replay()
    for result, eager in zip(tensors((results, args)), tensors((expected, eager_args)), strict=True):
        assert_bitwise(result, eager)


def chain(x: Tensor, weight: Tensor, steps: int = 6) -> Iterator[Tensor]:
    """Layers whose results depend on each other; each is dropped as soon as the next one is there."""
    for _ in range(steps):
        x = ops.gemm(x, weight, residual=x)
        yield x


def last(values: Iterator[Tensor]) -> Tensor:
    for value in values:  # noqa: B007
        pass
    return value


def test_intermediate_results_share_memory_and_stay_apart() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64, 64) / 8
    graph, addresses = ops.CPUGraph(), []
    with graph.capture():
        for y in chain(x, weight):
            addresses.append(y.data_ptr())
    assert len(graph) == 6
    assert len(set(addresses)) == 2  # a layer's input and its output
    x.normal_()
    graph.replay()
    assert_bitwise(y, last(chain(x, weight)))


def test_results_that_are_kept_are_not_overwritten() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64, 64) / 8
    graph = ops.CPUGraph()
    with graph.capture():
        results = list(chain(x, weight))
    x.normal_()
    graph.replay()
    for result, expected in zip(results, chain(x, weight), strict=True):
        assert_bitwise(result, expected)


def test_a_graph_keeps_its_inputs_alive_and_a_result_its_memory() -> None:
    x, weight = torch.randn(3, 1000), torch.randn(64, 1000)
    graph = ops.CPUGraph()
    with graph.capture():
        y = ops.silu_and_mul(ops.gemm(x, weight))
    expected = y.clone()
    del x, weight
    gc.collect()
    garbage = [torch.full((64, 1000), torch.nan) for _ in range(20)]
    y.zero_()
    graph.replay()
    assert_bitwise(y, expected)
    del graph, garbage
    gc.collect()
    garbage = [torch.full((3, 32), torch.nan) for _ in range(100)]
    assert_bitwise(y, expected)
    del garbage


def test_graphs_that_share_memory() -> None:
    x, weight = torch.randn(8, 64), torch.randn(64, 64) / 8
    memory = ops.GraphMemory()
    graphs, addresses = {}, set()
    for rows in (2, 8, 5):
        graph = ops.CPUGraph(memory)
        with graph.capture():
            layers = chain(x[:rows], weight)
            addresses.add(next(layers).data_ptr())
            y = last(layers)
        graphs[rows] = graph, y
    assert len(addresses) == 1
    for rows in (5, 2, 8, 5, 2):
        x.normal_()
        graph, y = graphs[rows]
        graph.replay()
        assert_bitwise(y, last(chain(x[:rows], weight)))
    del graphs, graph  # the last result alone holds the memory
    assert_bitwise(y, last(chain(x[:2], weight)))


def test_empty_tensors() -> None:
    graph = ops.CPUGraph()
    with graph.capture():
        y = ops.silu_and_mul(torch.empty(0, 8))
    graph.replay()
    assert y.shape == (0, 4)
    assert y.stride() == (4, 1)


FIRST = torch.tensor([0])

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "aten.add.Tensor": lambda x: x + x,
    "aten.add_.Tensor": lambda x: x.add_(x),
    "aten._to_copy.default|aten.to.dtype": lambda x: x.bfloat16(),
    "aten.clone.default|aten.contiguous.default": lambda x: x.T.contiguous(),
    "aten._unsafe_view.default|aten.clone.default|aten.reshape.default": lambda x: x.T.reshape(-1),
    "aten._local_scalar_dense.default|aten.item.default": lambda x: x[0, 0].item(),
    "aten.index.Tensor": lambda x: x[FIRST],
    "aten.zeros.default|aten.zero_.default": lambda x: torch.zeros(3),
    "aten.copy_.default": lambda x: x.copy_(x.T),
    "aten.cat.default": lambda x: torch.cat([x, x]),
    "aten.equal.default": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operators", REFUSED)
def test_what_a_replay_would_miss_is_refused(operators: str, inference: bool) -> None:
    x = torch.randn(4, 4)
    graph = ops.CPUGraph()

    def record() -> None:
        with graph.capture():
            ops.silu_and_mul(x)
            REFUSED[operators](x)

    with torch.inference_mode(inference):
        with pytest.raises(ops.GraphCaptureError, match=f"got ({operators}): "):
            record()
        with pytest.raises(RuntimeError, match="has no launches"):
            graph.replay()
        with graph.capture():  # it can be recorded after all
            ops.silu_and_mul(x)
    assert len(graph) == 1


@pytest.mark.parametrize("inference", [False, True])
def test_views_and_uninitialised_tensors_are_allowed(inference: bool) -> None:
    x = torch.randn(4, 24)
    graph = ops.CPUGraph()
    with torch.inference_mode(inference), graph.capture():
        a, b = x.contiguous().reshape(2, 48).view(4, 3, 8).split([1, 2], dim=1)
        y = ops.gemm(a.flatten(1).float().to(torch.float32)[1:], b.unflatten(1, (2, 1))[0].reshape(2, 8))
        assert torch.empty_like(y).shape == y.new_empty(3, 2).shape == torch.empty(3, 2).shape
    x.normal_()
    graph.replay()
    assert_bitwise(y, ops.gemm(x[1:, :8], x[0, 8:].view(2, 8)))


def test_another_device_is_refused() -> None:
    graph = ops.CPUGraph()
    with pytest.raises(ops.GraphCaptureError, match="got a tensor on meta"), graph.capture():
        ops.silu_and_mul(torch.empty(2, 8, device="meta"))


def test_an_exception_ends_the_recording() -> None:
    x = torch.randn(2, 8)
    graph = ops.CPUGraph()

    def record() -> None:
        with graph.capture():
            ops.silu_and_mul(x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record()
    assert len(graph) == 0
    with pytest.raises(RuntimeError, match="must be even"), graph.capture():
        ops.silu_and_mul(x[:, :3])
    ops.silu_and_mul(x)  # nobody records this
    with graph.capture():
        y = ops.silu_and_mul(x)
    assert len(graph) == 1
    graph.replay()
    assert_bitwise(y, ops.silu_and_mul(x))


def test_recordings_do_not_nest() -> None:
    x = torch.randn(2, 8)
    done, graph = ops.CPUGraph(), ops.CPUGraph()
    with done.capture():
        ops.silu_and_mul(x)
    with graph.capture():
        y = ops.silu_and_mul(x)
        with pytest.raises(RuntimeError, match="is being recorded in this thread already"), ops.CPUGraph().capture():
            pass
        with pytest.raises(RuntimeError, match="cannot be replayed while another is recorded"):
            done.replay()
    assert len(graph) == 1
    with pytest.raises(RuntimeError, match="has been recorded already"), graph.capture():
        pass
    x.normal_()
    graph.replay()
    assert_bitwise(y, ops.silu_and_mul(x))
    with pytest.raises(RuntimeError, match="has no launches"):
        ops.CPUGraph().replay()


def test_an_exception_in_the_middle_of_a_replay() -> None:
    logits, x = torch.randn(2, 50), torch.randn(2, 8)
    zeros, keys = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    parameters = [zeros, zeros.int(), torch.ones(2), zeros, keys, keys]
    graph = ops.CPUGraph()
    with graph.capture():
        before = ops.silu_and_mul(x)
        sampled = ops.sample(logits, *parameters)
        after = ops.silu_and_mul(x)
    good, old = logits.clone(), after.clone()
    logits[1, 7] = torch.nan
    x.normal_()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="logits row 1"):
            graph.replay()
        assert_bitwise(before, ops.silu_and_mul(x))
        assert_bitwise(after, old)
    logits.copy_(good)
    sampled.tokens.zero_()
    graph.replay()
    assert_bitwise(sampled.tokens, logits.argmax(-1))
    assert_bitwise(after, ops.silu_and_mul(x))


def test_other_threads_are_not_recorded_and_do_not_share_memory() -> None:
    x = torch.randn(2, 8)
    memory = ops.GraphMemory()
    graph = ops.CPUGraph(memory)

    def other() -> Tensor:
        sharing = ops.CPUGraph(memory)
        with pytest.raises(RuntimeError, match="a graph that shares this memory is being recorded"), sharing.capture():
            pass
        return ops.silu_and_mul(x) + 1  # which a recording would refuse

    with ThreadPoolExecutor(1) as pool:
        with graph.capture():
            pool.submit(other).result()
            ops.silu_and_mul(x)
        assert len(graph) == 1
        x.normal_()
        pool.submit(graph.replay).result()  # a replay may come from any thread


def test_threads_with_graphs_of_their_own() -> None:
    """Recordings and replays at the same time, beside operators that nobody records."""
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(5, 64, generator=generator), torch.randn(64, 64, generator=generator) / 8
        start.wait()
        for _ in range(10):
            graph = ops.CPUGraph()
            with graph.capture():
                y = last(chain(x, weight))
            assert len(graph) == 6
            for _ in range(10):
                x.normal_(generator=generator)
                expected = last(chain(x, weight))
                graph.replay()
                assert_bitwise(y, expected)

    with num_threads(2), ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_recording_does_not_import_the_compiler() -> None:
    """It would take two seconds, in the first decode step of every process."""
    code = (
        "import sys, torch, fastinfer.ops as ops\n"
        "x = torch.ones(1, 2)\n"
        "with ops.CPUGraph().capture(): ops.silu_and_mul(x)\n"
        "sys.exit('sympy' in sys.modules or 'torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_threads_read_ahead_of_weights_that_are_gone() -> None:
    x, results, graphs = torch.randn(1, 512), [], []
    weights = [torch.randn(4096, 512) for _ in range(3)]  # 8 MB each: its memory goes back to the system
    with num_threads(2):
        for weight in weights:
            graphs.append(ops.CPUGraph())
            with graphs[-1].capture():
                results.append(ops.gemm(x, weight))
        expected = ops.gemm(x, weights[0]).clone()
        graphs[1].replay()  # what its replay reads is next now
        del weights[1:], weight, graphs[1:]
        gc.collect()
        for _ in range(20):
            results[0].fill_(float("nan"))
            graphs[0].replay()
            assert_bitwise(results[0], expected)
