"""A stage of pipeline parallelism: consecutive layers of a model, at its ends with embedding or output layer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.utils.torch_threads import one_torch_thread
from fastinfer.weights.weight import LinearOptions, Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage(Decoder):
    """Consecutive layers of a model, in the interface of a whole one.

    The input of a stage without the first layer is ``hidden`` of the batch. Stages without the last layer compute no
    logits.

    Attributes:
        indices: numbers of the layers in the whole model, which ``config`` describes.
    """

    indices: range

    @property
    def is_first(self) -> bool:
        """Whether the stage has the first layer, and the embedding."""
        return self.indices.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the last layer, and the output layer."""
        return self.indices.stop == self.config.num_layers

    @property
    def num_storing_layers(self) -> int:
        return super().num_storing_layers - self.indices.start

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        # Layers that store nothing are in the last stage alone, which needs all rows before them.
        return super().forward(batch if self.is_last else replace(batch, last=None), kv_cache)

    def embed(self, batch: Batch) -> Tensor:
        if batch.hidden is None:
            return super().embed(batch)
        return batch.hidden

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        return super().logits(hidden, indices, adapter_ids) if self.is_last else hidden[:0]


@dataclass(frozen=True, eq=False)
class AbsentWeight(Weight):
    """Embedding or output layer that another stage has."""

    out_features: int

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        raise ValueError("the output layer is in the last stage")

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("the embedding is in the first stage")


def load_stage(checkpoint: Checkpoint, dtype: str, max_model_len: int | None, indices: range) -> Stage:
    """Load a stage of a model.

    Args:
        checkpoint: an open checkpoint.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        max_model_len: length of the longest sequence in tokens; ``None`` for the model's own limit.
        indices: numbers of its layers.

    Raises:
        FastinferError: as for :func:`fastinfer.models.load_weights`.
    """
    with one_torch_thread():
        return StageLoader(LayerReader(checkpoint, Precision.of(dtype), "cpu"), max_model_len, indices).stage()


class StageLoader(DecoderLoader):
    """Builder of a stage; the arguments are those of :class:`DecoderLoader` and :func:`load_stage`."""

    def __init__(self, reader: LayerReader, max_model_len: int | None, indices: range) -> None:
        super().__init__(reader, max_model_len)
        self._indices = indices

    def stage(self) -> Stage:
        """Read the weights of the stage."""
        config, indices = self._config, self._indices
        is_first, is_last = indices.start == 0, indices.stop == config.num_layers
        absent = AbsentWeight(config.vocab_size)
        head = (self.lm_head() or self.embedding()) if is_last else absent
        return Stage(
            config=config,
            dtype=self._reader.precision.dtype,
            exact=self._reader.precision.exact,
            embedding=self.embedding() if is_first else absent,
            layers=self.layers(indices),
            norm=self.norm(),
            lm_head=head,
            embedding_norm=self.embedding_norm() if is_first else None,
            position_embedding=self.position_embedding() if is_first else None,
            indices=indices,
        )
