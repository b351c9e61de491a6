"""Models: a decoder whose sizes come from the checkpoint, and the loaders that build it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, RequestError
from fastinfer.formats.gguf_shards import open_gguf
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Tap
from fastinfer.models.draft_head import DraftHead
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_heads import DFLASH, EAGLE3, GGUFDFlashCheckpoint, GGUFHeadCheckpoint
from fastinfer.models.gguf_mtp import GGUFMTPCheckpoint
from fastinfer.models.head_loader import load_dflash_head, load_eagle_head, load_mtp_head, with_vocabulary
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_dflash import BLOCK_KINDS, HFDFlashCheckpoint
from fastinfer.models.hf_heads import HFHeadCheckpoint, hf_head_kind
from fastinfer.models.hf_mtp import HFMTPCheckpoint
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from fastinfer.models.lora import AdapterSlots
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.device import resolve_device
from fastinfer.utils.torch_threads import one_torch_thread


class Model(Protocol):
    """Interface of a model to the engine."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and constants of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        ...

    @property
    def exact(self) -> bool:
        """Whether neither weights nor activations may be rounded."""
        ...

    @property
    def draft_tokens(self) -> Tensor | None:
        """The token of each column of the logits, for a draft model with a reduced vocabulary; ``None`` for all."""
        ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """Slots of LoRA adapters; ``None`` for none."""
        ...

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step and fill the cache; return [tokens, hidden], the last layer's output before the last norm.

        If the batch says which rows are wanted, only these are returned, see :class:`fastinfer.models.batch.LastRows`.
        """
        ...

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        """Compute logits [n, vocab] for rows of the result of :meth:`forward`.

        Args:
            hidden: [tokens, hidden], the result of :meth:`forward`.
            indices: [n] int64; the rows.
            adapter_ids: [n] int32; their LoRA adapters, -1 for none; ``None`` if none has an adapter.
        """
        ...

    def with_adapters(self, slots: AdapterSlots) -> "Model":
        """Return a model with the same weights that applies adapters from these slots, by a batch's ``adapter_ids``."""
        ...

    def with_taps(self, taps: Mapping[int, Tap]) -> "Model":
        """Return a model with the same weights that passes the outputs of layers on, see :class:`Decoder`."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to rows of the result of :meth:`forward`; the logits are computed from it."""
        ...


LoadWeights = Callable[[Checkpoint, str, str, int | None], Model]


def load_model(
    source: Path | Checkpoint,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    load: LoadWeights | None = None,
) -> tuple[Model, Tokenizer]:
    """Load a checkpoint and its tokenizer.

    Args:
        source: a ``.gguf`` file, a folder of safetensors files with their ``config.json``, or one of them opened by
            :func:`open_checkpoint` for the same dtype and device.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, or ``"auto"``.
        max_model_len: length of the longest sequence in tokens; ``None`` for the model's own limit.
        load: function that loads the weights; :func:`load_weights` by default.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: the checkpoint cannot be
            read, is malformed, or holds something that is not implemented.
        RequestError: the device is not available, or does not support the dtype, or the checkpoint is a draft head.
    """
    device = resolve_device(device)
    checkpoint = open_checkpoint(source, Precision.of(dtype, device).exact) if isinstance(source, Path) else source
    tokenizer = read_tokenizer(checkpoint)
    model = (load or load_weights)(checkpoint, dtype, device, max_model_len)
    tokenizer.pad(model.config.vocab_size)
    return model, tokenizer


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Read a checkpoint's tokenizer.

    Raises:
        CheckpointFormatError, GGUFFormatError, UnsupportedModelError: as for :class:`Tokenizer`, or the tokenizer has
            more tokens than the model.
        RequestError: the checkpoint is a draft head.
    """
    if checkpoint.config.is_draft_head:
        raise RequestError(f"{checkpoint.path}: the model must be a whole one, got a draft head")
    with one_torch_thread():
        if isinstance(checkpoint, GGUFCheckpoint):
            tokenizer = Tokenizer.from_gguf(checkpoint.file)
        else:
            tokenizer = Tokenizer.from_folder(checkpoint.path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise CheckpointFormatError(
            f"{checkpoint.path}: expected an embedding of at least {tokenizer.vocab_size} rows, as many as the "
            f"tokenizer has tokens, got {checkpoint.config.vocab_size}"
        )
    return tokenizer


def load_weights(checkpoint: Checkpoint, dtype: str, device: str, max_model_len: int | None) -> Model:
    """Load a checkpoint without its tokenizer; arguments and errors are those of :func:`load_model`."""
    precision = Precision.of(dtype, device)
    with one_torch_thread():
        if isinstance(checkpoint, HFHeadCheckpoint | GGUFHeadCheckpoint):
            return load_eagle_head(checkpoint, precision, max_model_len, device)
        if isinstance(checkpoint, HFMTPCheckpoint | GGUFMTPCheckpoint):
            return load_mtp_head(checkpoint, precision, max_model_len, device)
        if isinstance(checkpoint, HFDFlashCheckpoint | GGUFDFlashCheckpoint):
            return load_dflash_head(checkpoint, precision, max_model_len, device)
        return load_decoder(checkpoint, precision, max_model_len, device)


def load_whole_head(
    open_model: Callable[[], Checkpoint], checkpoint: Checkpoint, dtype: str, device: str, max_model_len: int | None
) -> Model:
    """Load a draft head that shares no weight with its model, which is divided among ranks.

    Args:
        open_model: function that opens the model's checkpoint.
        checkpoint, dtype, device, max_model_len: see :func:`load_weights`.
    """
    head = load_weights(checkpoint, dtype, device, max_model_len)
    assert isinstance(head, DraftHead)
    with one_torch_thread():
        return with_vocabulary(head, open_model(), Precision.of(dtype, device), max_model_len, device)


def check_has_all_logits(model: Model) -> None:
    """Check that a model can do more than draft.

    Raises:
        RequestError: it is a draft head, or has logits for a part of the vocabulary alone.
    """
    if model.config.is_draft_head:
        raise RequestError("the model must be a whole one, got a draft head")
    if model.draft_tokens is not None:
        raise RequestError(
            f"the model must have logits for all {model.config.vocab_size} tokens, got a draft model with logits for "
            f"{len(model.draft_tokens)} of them"
        )


def open_checkpoint(path: Path, exact: bool = False) -> Checkpoint:
    """Open a ``.gguf`` file or a folder, and read and check its header.

    Args:
        path: a ``.gguf`` file, or a folder of safetensors files with their ``config.json``.
        exact: whether to keep all numbers of quantised weights unrounded, which takes more memory and time.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as for :func:`load_model`.
    """
    if path.is_dir():
        kind = hf_head_kind(path)
        if kind is None:
            return HFCheckpoint(path, exact)
        return HFDFlashCheckpoint(path, exact) if kind in BLOCK_KINDS else HFHeadCheckpoint(path, exact)
    file = open_gguf(path)
    kinds = {EAGLE3: GGUFHeadCheckpoint, DFLASH: GGUFDFlashCheckpoint}
    return kinds.get(str(file.metadata.get("general.architecture")), GGUFCheckpoint)(file, exact)


def open_mtp_checkpoint(path: Path, exact: bool = False, max_layers: int | None = None) -> Checkpoint:
    """Open the layers for multi-token prediction in a model's checkpoint.

    Args:
        path, exact: see :func:`open_checkpoint`.
        max_layers: number of layers to read at most, from the first one on; ``None`` for all.

    Raises:
        FastinferError: as for :func:`open_checkpoint`.
        RequestError: the checkpoint has no such layer.
    """
    if path.is_dir():
        return HFMTPCheckpoint(path, exact, max_layers)
    return GGUFMTPCheckpoint(open_gguf(path), exact, max_layers)
