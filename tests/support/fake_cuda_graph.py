"""CUDA graphs and GPU memory for machines without a GPU: the engine's own code around them runs."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastinfer.engine import cuda_graphs, sampler
from fastinfer.engine.batch_inputs import BatchInputs
from fastinfer.engine.engine import Engine
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.ops import invariance
from support.toy import ToyModel


class FakeGraph:
    """Repeats the calls where a CUDA graph repeats kernels, as batch-invariant as they were when it was captured."""

    def __init__(self, step: Callable[[], None], stream: object, pool: object) -> None:
        step()
        self.step, self.given_stream, self.given_pool, self.num_replays = step, stream, pool, 0
        self.invariant = is_batch_invariant()

    def replay(self) -> None:
        self.num_replays += 1
        before = invariance.ops.set_batch_invariant(self.invariant)
        self.step()
        invariance.ops.set_batch_invariant(before)

    def pool(self) -> str:
        return "pool"


class FakeHostCopy:
    """Copies at once, as a GPU does before the kernels that are launched later."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        return self._copies


class PaddedToy(ToyModel):
    """Takes padded steps, as the CUDA kernels do."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        num_tokens = int(batch.query_start[-1])
        assert (batch.slot_mappings[0][num_tokens:] == -1).all()
        used = {name: getattr(batch, name)[:num_tokens] for name in ("token_ids", "positions")}
        slot_mappings = tuple(slots[:num_tokens] for slots in batch.slot_mappings)
        hidden = super().forward(replace(batch, slot_mappings=slot_mappings, **used), kv_cache).long()
        return torch.cat([hidden, hidden.new_zeros(len(batch.token_ids) - num_tokens, 1)])


def is_batch_invariant() -> bool:
    before = invariance.ops.set_batch_invariant(False)
    invariance.ops.set_batch_invariant(before)
    return before


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "capture", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    # Nothing is captured, and to collect the garbage of a whole test run takes longer than all else.
    monkeypatch.setattr(cuda_graphs, "without_garbage_collection", contextlib.nullcontext)
    monkeypatch.setattr(sampler, "HostCopy", FakeHostCopy)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


def with_twin(inputs: BatchInputs) -> BatchInputs:
    """As on a GPU: what is written reaches the operators by an upload alone."""
    inputs._memory = torch.full_like(inputs._memory, 0x7F)
    inputs.device = torch.device("cuda")
    return inputs


def use_graphs(engine: Engine) -> Engine:
    """An engine that was made with ``enforce_eager``, now with captured steps."""
    for worker in engine._workers:
        runner = worker.runner
        with engine._context():
            with_twin(runner.inputs)
            runner._enforce_eager = False
            runner.graphs = runner._make_graphs()
    return engine


class Calls(TorchDispatchMode):
    """Notes the calls that reach the device outside of graphs, without views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._in_call = False
        for kind, method in ((FakeGraph, "replay"), (FakeHostCopy, "__init__"), (torch.Tensor, "pin_memory")):
            self._name(monkeypatch, kind, method)

    def _name(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any], method: str) -> None:
        call = getattr(kind, method)

        def named(*args: Any) -> Any:
            self.names.append(f"{kind.__name__}.{method}")
            self._in_call = True
            try:
                return call(*args)
            finally:
                self._in_call = False

        monkeypatch.setattr(kind, method, named)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._in_call and not func.is_view:
            self.names.append(str(func))
        return result
