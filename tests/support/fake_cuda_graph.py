"""CUDA graphs and GPU memory for machines without a GPU: the engine's own code around them runs."""

from collections.abc import Callable

import pytest
import torch

from fastinfer.engine import cuda_graphs
from fastinfer.engine.batch_inputs import BatchInputs
from fastinfer.ops import invariance


class FakeGraph:
    """Repeats the calls where a CUDA graph repeats kernels, as batch-invariant as they were when it was captured."""

    def __init__(self, step: Callable[[], None], pool: object) -> None:
        step()
        self.step, self.given_pool, self.num_replays = step, pool, 0
        self.invariant = is_batch_invariant()

    def replay(self) -> None:
        self.num_replays += 1
        before = invariance._set(self.invariant)
        self.step()
        invariance._set(before)

    def pool(self) -> str:
        return "pool"


def is_batch_invariant() -> bool:
    before = invariance._set(False)
    invariance._set(before)
    return before


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "capture", FakeGraph)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


def with_twin(inputs: BatchInputs) -> BatchInputs:
    """As on a GPU: what is written reaches the operators by an upload alone."""
    inputs._memory = torch.full_like(inputs._memory, 0x7F)
    inputs.device = torch.device("cuda")
    return inputs
