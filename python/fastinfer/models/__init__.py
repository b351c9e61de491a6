"""Models: a decoder that reads its sizes from the checkpoint, and the loaders that build it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastinfer.device import resolve_device
from fastinfer.engine.batch import Batch
from fastinfer.engine.kv_tensors import KVCacheTensors
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gguf_loader import load_gguf
from fastinfer.models.lora import AdapterSlots
from fastinfer.tokenizer import Tokenizer


class Model(Protocol):
    """What the engine needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: Batch, kv_cache: KVCacheTensors) -> Tensor:
        """Compute a step, filling the cache; [tokens, hidden] of the last layer, before the last norm."""
        ...

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Logits [n, vocab] of rows [n] int64 of what :meth:`forward` returned."""
        ...

    def with_adapters(self, slots: AdapterSlots) -> "Model":
        """The same weights, computing a batch's ``adapter_ids`` with the adapters in these slots."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """The last norm of rows of what :meth:`forward` returned: what the logits are made from."""
        ...


def load_model(
    path: Path, dtype: str = "auto", device: str = "cpu", max_model_len: int | None = None
) -> tuple[Model, Tokenizer]:
    """Load a checkpoint and its tokenizer.

    Args:
        path: a ``.gguf`` file.
        dtype: see :meth:`fastinfer.models.config.Precision.of`.
        device: ``"cpu"``, ``"cuda"`` (not yet run on a GPU), or ``"auto"``.
        max_model_len: longest sequence that will be asked for, ``None`` for the model's own limit.

    Raises:
        ModelNotFoundError, GGUFFormatError, UnsupportedModelError: the file cannot be read, is malformed, or holds
            something that is not implemented.
        RequestError: the device is missing, or cannot compute in this dtype.
    """
    device = resolve_device(device)
    precision = Precision.of(dtype, device)
    file = GGUFFile(path)
    with _one_torch_thread():
        model = load_gguf(file, precision, max_model_len, device)
    return model, Tokenizer.from_gguf(file)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch's own thread pool out of loading's many small copies.

    Its barriers spin: on two cores with another busy process each copy took 2 ms instead of 20 us, and loading 2.0 s
    instead of 0.4 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
