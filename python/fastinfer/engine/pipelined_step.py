"""Steps of an engine whose model is divided into stages: as many are in flight as there are stages."""

import time
from collections import deque
from typing import Any, NamedTuple

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.engine.stats import StepStats
from fastinfer.engine.step import Launched, Step, is_wanted


class _InFlight(NamedTuple):
    """A step whose logits are not computed yet.

    Attributes:
        chunks: the chunks that it computes.
        rows: their rows of logits.
        start, start_compute: see :class:`fastinfer.engine.step.Launched`.
    """

    chunks: list[Chunk]
    rows: list[LogitsRow]
    start: float
    start_compute: float


class PipelinedStep(Step):
    """Launches steps until each stage has one to compute, and completes the oldest of them.

    Chunks of one prompt follow each other without waiting. A sequence whose next token is still to be drawn takes no
    part in further steps, and the scheduler divides the others evenly, so that their steps take turns.

    While steps are in flight, another one is launched only if no sequence would have to be preempted for it.

    Args:
        worker: worker of the last stage.
        options: the other arguments of :class:`fastinfer.engine.step.Step`.
    """

    def __init__(self, worker: RankWorker, **options: Any) -> None:
        super().__init__(worker=worker, runs_ahead=False, **options)
        self._stages = worker
        self._in_flight: deque[_InFlight] = deque()

    def __call__(self) -> StepStats | None:
        """Complete the oldest step in flight; see :class:`fastinfer.engine.step.Step`."""
        try:
            if not self._in_flight:
                self._stages.complete_all()  # what an error has left, so that all stages have the same keys and values
            while True:
                while len(self._in_flight) < self._stages.num_slots and self._has_room and self._launch_stages():
                    pass
                if not self._in_flight:
                    return None
                chunks, rows, start, start_compute = self._in_flight.popleft()
                result = self._stages.collect()
                self._stages.report(chunks, result)
                if any(map(is_wanted, chunks)):
                    draw = self._sampler.launch(result, rows)
                    stats = self._collect(Launched(chunks, result, draw, start, start_compute))
                    if not self._in_flight:  # or else the next launch stores blocks before it needs their room
                        self._save_blocks()
                    return stats
        except BaseException:
            self._in_flight.clear()
            self._requests.repair()
            raise

    def forget_launched(self) -> None:
        """Forget the steps in flight for sequences that have ended meanwhile; the next step completes them."""
        self._in_flight.clear()

    @property
    def _has_room(self) -> bool:
        """Whether a step can be launched now without preempting a sequence that is in flight."""
        return not self._in_flight or self._block_manager.num_available >= len(self._scheduler.running)

    def _launch_stages(self) -> bool:
        """Launch a step, and return whether there was anything to compute."""
        start = time.perf_counter()
        chunks, rows = self._choose(waits=not self._in_flight)
        if not chunks:
            return False
        start_compute = time.perf_counter()
        self._stages.launch(chunks, rows)
        self._in_flight.append(_InFlight(chunks, rows, start, start_compute))
        self._mark_launched(chunks)
        return True
