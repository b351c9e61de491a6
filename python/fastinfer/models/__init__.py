"""Models: a decoder that reads its sizes from the checkpoint, and the loaders that build it."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.models.lora import AdapterSlots
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.device import resolve_device
from fastinfer.utils.torch_threads import one_torch_thread


class Model(Protocol):
    """What the engine needs of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
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
        path: a ``.gguf`` file, or a folder of safetensors files with their ``config.json``.
        dtype: see :meth:`fastinfer.models.config.Precision.of`.
        device: ``"cpu"``, ``"cuda"`` (not yet run on a GPU), or ``"auto"``.
        max_model_len: longest sequence that will be asked for, ``None`` for the model's own limit.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: the checkpoint cannot be
            read, is malformed, or holds something that is not implemented.
        RequestError: the device is missing, or cannot compute in this dtype.
    """
    device = resolve_device(device)
    precision = Precision.of(dtype, device)
    with one_torch_thread():
        checkpoint = open_checkpoint(path, exact=precision.dtype == torch.float32 and precision.activation_bits == 32)
        if isinstance(checkpoint, GGUFCheckpoint):
            tokenizer = Tokenizer.from_gguf(checkpoint.file)
        else:
            tokenizer = Tokenizer.from_folder(path)
        model = load_decoder(checkpoint, precision, max_model_len, device)
    tokenizer.pad(model.config.vocab_size)
    return model, tokenizer


def open_checkpoint(path: Path, exact: bool = False) -> Checkpoint:
    """A ``.gguf`` file or a folder, of which the header is read and checked.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as :func:`load_model`.
    """
    return HFCheckpoint(path, exact) if path.is_dir() else GGUFCheckpoint(GGUFFile(path), exact)
