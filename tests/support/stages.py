"""An engine of the toy model with several steps in flight, as if the other stages were elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.engine import Engine
from fastinfer.engine.pipelined_step import PipelinedStep
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.parallel.group import Team


class LoneGroup:
    """The last rank of a group whose others have nothing to compute."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.team = Team(0, 1, torch.empty(0))
        self.num_sent = self.num_done = 0

    def team_ranks(self, number: int) -> range:
        return range(number, number + 1)

    def allocate_inputs(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)

    def send(self, words: list[int]) -> None:
        self.num_sent += 1

    def wait_for(self, rank: int) -> None:
        assert rank == self.size - 1
        assert self.num_done < self.num_sent

    def finish(self) -> None:
        self.num_done += 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """Without faults at lines: an error in here ends all ranks, and the engine with them."""
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(trace)


def use_stages(engine: Engine, num_stages: int) -> Engine:
    """Let an engine of a toy have as many steps in flight; the toy is the last stage, and computes all layers."""
    model: Any = engine.model
    model.indices, model.is_first, model.adapters = range(model.config.num_layers), True, None
    model.config.__dict__["hidden_size"] = 1
    old, group = engine.worker, LoneGroup(num_stages)
    engine.worker = worker = RankWorker(
        engine.config,
        model,
        old._size,
        with_adapters=False,
        separates_roles=old._separates_roles,
        drops_rows=old._drops_rows,
        group=group,  # type: ignore[arg-type]
    )
    for tensor in (tensor for cache in worker.kv_cache for tensor in cache.tensors):
        tensor.fill_(float("nan"))
    engine._workers[0] = worker
    engine.scheduler._num_in_flight = num_stages
    engine._step = PipelinedStep(
        worker,
        draft_worker=engine.draft_worker,
        speculator=engine.speculator,
        sampler=engine.sampler,
        scheduler=engine.scheduler,
        block_manager=engine.block_manager,
        offloading=engine.offloading,
        requests=engine.requests,
    )
    return engine


def has_stages(engine: Engine) -> bool:
    return isinstance(engine._step, PipelinedStep)


def chunks_in_flight(engine: Engine) -> list[Chunk]:
    """The chunks of all steps whose logits are not computed yet."""
    step = engine._step
    return [chunk for flight in step._in_flight for chunk in flight.chunks] if isinstance(step, PipelinedStep) else []
