"""The process of a rank other than 0: it loads its part of the model, and carries out what rank 0 asks for."""

import os
import pickle
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from fastinfer import _C
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.roles import roles_differ
from fastinfer.engine.stage_worker import StageWorker
from fastinfer.engine.worker import Worker
from fastinfer.errors import describe_error
from fastinfer.models import Model, open_checkpoint
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.parallel.group import MAX_MESSAGES, Group, is_abort
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.ranks import Ranks
from fastinfer.parallel.sharded_adapters import SlotSizes
from fastinfer.parallel.stage import Stage, load_stage
from fastinfer.utils.parent import end_with_parent
from fastinfer.utils.text import one_line


@dataclass(frozen=True)
class RankTask:
    """The part of the model and the settings that a rank computes with.

    Attributes:
        path: path of the model.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        config: configuration of the engine.
        size: size of the KV cache.
        num_ranks: number of ranks.
    """

    path: Path
    dtype: str
    config: EngineConfig
    size: KVCacheSize
    num_ranks: int

    def create_group(self) -> Group:
        """Allocate the memory of the ranks, and return the view of rank 0."""
        return Group.create(self.num_ranks)

    def load_model(self, checkpoint: Checkpoint, group: Group) -> Model:
        """Load a rank's part of the model, with slots for adapters if there are any."""
        config, slots = self.config, None
        if config.max_loras:
            slots = SlotSizes(config.max_loras, config.max_lora_rank, config.lora_dtype)
        max_model_len, layout = self.size.max_model_len, config.tensor_parallel_layout
        return load_shard(checkpoint, self.dtype, max_model_len, group, slots, layout)

    def load_worker(self, group: Group) -> Worker:
        """Load a rank's part of the model, and allocate its part of the KV cache."""
        model = self.load_model(open_checkpoint(self.path, Precision.of(self.dtype).exact), group)
        return Worker(
            self.config,
            model,
            self.size,
            with_adapters=self.config.max_loras > 0,
            separates_roles=roles_differ("cpu", model.exact),
            group=group,
        )


@dataclass(frozen=True)
class StageTask(RankTask):
    """The same for ranks that have consecutive layers of the model each.

    Attributes:
        stages: the layers of each stage. Stage 0 is that of rank 1, and the last one that of rank 0.
    """

    stages: list[range]

    def create_group(self) -> Group:
        return Group.create(self.num_ranks, num_messages=MAX_MESSAGES, purpose="pipeline parallelism")

    def load_model(self, checkpoint: Checkpoint, group: Group) -> Stage:
        return load_stage(checkpoint, self.dtype, self.size.max_model_len, self.stages[group.rank - 1])

    def load_worker(self, group: Group) -> Worker:
        stage = self.load_model(open_checkpoint(self.path, Precision.of(self.dtype).exact), group)
        return StageWorker(self.config, stage, self.size, separates_roles=roles_differ("cpu", stage.exact), group=group)


def start_ranks(task: RankTask) -> Ranks:
    """Start the ranks beside this process, which becomes rank 0. They share its threads."""
    num_threads = max(1, _C.get_num_threads() // task.num_ranks)
    return Ranks(task.create_group(), __name__, task, num_threads)


def main(parent: str, rank: str) -> None:
    """Run a rank until rank 0 ends it.

    Args:
        parent: id of the process of rank 0.
        rank: number of this rank.
    """
    end_with_parent(int(parent))
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries are no reports
    task, fds = pickle.load(sys.stdin.buffer)  # from the parent's own pipe
    threading.Thread(target=_wait_for_end_of_input, daemon=True).start()
    group = Group(int(rank), task.num_ranks, *fds)
    try:
        worker = task.load_worker(group)
        print("ready", file=report, flush=True)
        with torch.inference_mode():
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
