"""Freeing an idle engine's memory, and getting it back."""

import gc
from collections.abc import Callable

import torch

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.worker import Worker
from fastinfer.errors import RequestError
from fastinfer.models import Model
from fastinfer.models.lora import AdapterSlots
from fastinfer.models.offload import HostCopy, tensors_of
from fastinfer.utils.checks import check_int

LoadModels = Callable[[], list[Model]]


class SleepMode:
    """Frees the memory that an idle engine does not need, after the example of vLLM's sleep mode.

    ================  =====================================  ===============================
    freed             level 1                                level 2
    ================  =====================================  ===============================
    KV caches         yes                                    yes
    recorded graphs   yes, as they refer to the KV caches    yes
    weights           on a GPU: moved to the host's memory   yes: loaded again from the files
    LoRA adapters     on a GPU: moved to the host's memory   as for level 1
    ================  =====================================  ===============================

    On a CPU weights already are in the host's memory, and level 1 leaves them there.

    Args:
        workers: workers of the model and of the draft model, if there is one.
        block_manager: manager of the blocks of the KV caches.
        adapters: slots of the model's LoRA adapters; ``None`` if it has none.
        load_models: function that loads the models of the workers again; ``None`` if nothing can.
        offloading: stores of blocks beyond the KV caches; ``None`` for none.

    Attributes:
        level: 1 or 2; 0 while the engine is awake.
    """

    def __init__(
        self,
        workers: list[Worker],
        block_manager: BlockManager,
        adapters: AdapterSlots | None,
        load_models: LoadModels | None,
        offloading: KVOffloading | None,
    ) -> None:
        self.level = 0
        self._workers = workers
        self._block_manager = block_manager
        self._adapters = adapters
        self._load_models = load_models
        self._offloading = offloading
        self._configs = [worker.model.config for worker in workers]
        self._host_copy: HostCopy | None = None

    def check(self, level: int) -> None:
        """Check that the engine can sleep at this level.

        Raises:
            RequestError: it cannot, or sleeps already.
        """
        check_int("level", level, 1, 2)
        if level == 2 and self._load_models is None:
            raise RequestError("level must be 1 for an engine that cannot load its models again, got 2")
        if level == 2 and self._offloading is not None and self._offloading.disk is not None:
            raise RequestError("level must be 1 with kv_offloading_dir, which belongs to the weights in memory, got 2")
        if self.level:
            raise RequestError(f"the engine sleeps already, at level {self.level}")

    def sleep(self, level: int, pinned: list[Sequence]) -> None:
        """Free the memory.

        Args:
            level: 1 or 2.
            pinned: the only sequences that hold blocks, which they lose.
        """
        models = [worker.model for worker in self._workers] if level == 1 else []
        on_gpus = [tensor for tensor in tensors_of([models, self._adapters]) if tensor.is_cuda]
        if on_gpus:
            self._host_copy = HostCopy(on_gpus)
        self.level = level  # from here on wake_up() repairs what was left half done
        for sequence in pinned:
            self._block_manager.free(sequence)
        if self._offloading is not None:
            self._offloading.save()  # of requests that ended since the last step
        self._block_manager.reset_prefix_cache()
        if level == 2 and self._offloading is not None and self._offloading.host is not None:
            self._offloading.host.clear()  # the files may hold other weights when they are loaded again
        for worker in self._workers:
            worker.release(with_model=level == 2)
        gc.collect()  # runners and their graphs refer to each other, and hold the weights
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Get everything back; if this raises an error, the engine sleeps on and may be woken up later.

        Only if another rank could not load its part, the engine is lost.

        Raises:
            RuntimeError: another rank could not load its part now or at an earlier call.
            RequestError: the files now hold another model.
        """
        if not all(worker.has_model for worker in self._workers):
            self._reload()
        if self._host_copy is not None:
            self._host_copy.restore()
            self._host_copy = None
        for worker in reversed(self._workers):  # the model's graphs write to the cache of a draft head
            worker.restore()
        self.level = 0

    def _reload(self) -> None:
        assert self._load_models is not None
        models = self._load_models()
        for model, config in zip(models, self._configs, strict=True):
            if model.config != config:
                raise RequestError(
                    f"the files must hold the model that was loaded first, {config}, got another: {model.config}"
                )
        if self._adapters is not None:
            models[0] = models[0].with_adapters(self._adapters)
        for worker, model in zip(self._workers, models, strict=True):
            worker.reload(model)
