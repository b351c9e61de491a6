"""Ranks whose steps of several sequences are two halves wherever that is possible, also on a CPU, where it never pays.

``rank_process`` runs :func:`main` of this module in the processes of ranks if its ``__name__`` is this module's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from fastinfer.engine import rank_process, rank_worker
from fastinfer.engine.halves import Halves
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.parallel.stage import Stage


def first_half(lengths: Sequence[int], device: str = "", costs: object = None) -> int | None:
    """In place of fastinfer.parallel.nano_batches.split."""
    return len(lengths) // 2 or None


def halve_all(patch: pytest.MonkeyPatch) -> None:
    """Let this process compute all steps as halves that it can."""
    make = RankWorker._make_halves

    def make_halves(self: RankWorker, model: Stage) -> Halves | None:
        return make(self, model) or Halves((model, model), self.kv_cache, self.device, first_half)

    patch.setattr(rank_worker, "split", first_half)
    patch.setattr(RankWorker, "_make_halves", make_halves)


@contextmanager
def halved_ranks() -> Iterator[None]:
    """Let the ranks of engines that are made in the block compute all steps as halves that they can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_process, "__name__", __name__)
        halve_all(patch)
        yield


def main(rank: int) -> None:
    """The process of another rank."""
    halve_all(pytest.MonkeyPatch())
    rank_process.main(rank)
