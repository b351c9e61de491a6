"""The process of a rank other than 0: it loads its part of the model, and carries out what rank 0 asks for."""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastinfer import _C
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.model_context import model_context
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.errors import describe_error
from fastinfer.models import open_checkpoint
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.parallel.group import MAX_MESSAGES, Group, is_abort
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.peer_group import unconnected_team
from fastinfer.parallel.ranks import Ranks
from fastinfer.parallel.sharded_adapters import SlotSizes
from fastinfer.parallel.stage import Stage
from fastinfer.utils.text import one_line


@dataclass(frozen=True)
class RankTask:
    """The part of the model and the settings that a rank computes with.

    Attributes:
        path: path of the model.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        config: configuration of the engine.
        size: size of the KV cache.
        stages: the layers of each stage. Team 0 has the last one, team 1 the first.
        drops_rows: see :class:`fastinfer.engine.worker.Worker`.
    """

    path: Path
    dtype: str
    config: EngineConfig
    size: KVCacheSize
    stages: list[range]
    drops_rows: bool

    def create_group(self) -> Group:
        """Allocate the memory of the ranks, and return the view of rank 0."""
        sizes = {"tensor": self.config.tensor_parallel_size, "pipeline": self.config.pipeline_parallel_size}
        purpose = " and ".join(name for name, size in sizes.items() if size > 1) + " parallelism"
        return Group.create(
            self.config.num_ranks, num_messages=MAX_MESSAGES, purpose=purpose, team_size=sizes["tensor"]
        )

    def join_group(self, rank: int, fds: tuple[int, int]) -> Group:
        """Return the view of another rank, given the file descriptors of the group."""
        return Group(rank, self.config.num_ranks, *fds, team_size=self.config.tensor_parallel_size)

    def load_model(self, checkpoint: Checkpoint, group: Group) -> Stage:
        """Load a rank's part of the model, with slots for adapters if there are any."""
        config, slots = self.config, None
        if config.max_loras:
            slots = SlotSizes(config.max_loras, config.max_lora_rank, config.lora_dtype)
        device = config.device_of(group.rank)
        if device != "cpu":
            group.team = unconnected_team(group)
        layers = self.stages[group.rank // group.team.size - 1]
        max_model_len, layout = self.size.max_model_len, config.tensor_parallel_layout
        return load_shard(checkpoint, self.dtype, max_model_len, group, slots, layers, layout, device)

    def load_worker(self, group: Group, report: Callable[[], None]) -> RankWorker:
        """Load a rank's part of the model, and allocate its part of the KV cache.

        Args:
            group: the rank's view of the group.
            report: function that reports to rank 0: on a GPU once the part is loaded, then once there is a worker, and
                each time that the part was loaded again.
        """
        device = self.config.device_of(group.rank)

        def load() -> Stage:
            return self.load_model(open_checkpoint(self.path, Precision.of(self.dtype, device).exact), group)

        def load_again() -> Stage:
            model = load()
            report()
            return model

        model = load()
        if device != "cpu":
            report()
            group.start_together()  # to record steps
        worker = RankWorker(
            replace(self.config, device=device),
            model,
            self.size,
            with_adapters=self.config.max_loras > 0,
            separates_roles=False,  # rank 0 alone divides steps, and tells the others
            drops_rows=self.drops_rows,
            group=group,
            load=load_again,
        )
        report()
        return worker


def start_ranks(task: RankTask) -> Ranks:
    """Start the ranks beside this process, which becomes rank 0. They share its threads."""
    num_threads = max(1, _C.get_num_threads() // task.config.num_ranks)
    return Ranks(task.create_group(), __name__, task, num_threads)


def main(rank: int) -> None:
    """Run a rank, given its number, until rank 0 ends it."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries are no reports
    task, fds = pickle.load(sys.stdin.buffer)  # from the parent's own pipe
    threading.Thread(target=_wait_for_end_of_input, daemon=True).start()
    group = task.join_group(rank, fds)
    try:
        device = task.config.device_of(group.rank)
        with torch.inference_mode(), model_context(device, task.config.deterministic):
            worker = task.load_worker(group, lambda: print("ready", file=report, flush=True))
            while True:
                worker.follow()
    except BaseException as error:
        if is_abort(error):  # which another rank has caused, and reports
            os._exit(0)
        print(one_line(describe_error(error)), file=report, flush=True)
        group.abort()
        os._exit(1)


def _wait_for_end_of_input() -> None:
    """End the process once the parent has closed its end of the pipe, or has ended."""
    sys.stdin.buffer.read()
    os._exit(1)
