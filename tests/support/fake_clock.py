"""A clock for benchmarks of the toy model, which makes every measured time exact."""

import pytest
from torch import Tensor

from fastinfer.benchmarks import replay
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from support.toy import ToyModel


class FakeClock:
    """Goes on by a second for every token that the toy computes, and while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def use_fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock, forward = FakeClock(), ToyModel.forward

    def timed(model: ToyModel, batch: Batch, kv_cache: KVCache) -> Tensor:
        clock.sleep(len(batch.token_ids))
        return forward(model, batch, kv_cache)

    monkeypatch.setattr(ToyModel, "forward", timed)
    monkeypatch.setattr(replay, "time", clock)
    return clock
