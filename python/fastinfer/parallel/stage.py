"""A stage of pipeline parallelism: consecutive layers of a model, at its ends with embedding or output layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.lora import AdapterSlots, LayerAdapters
from fastinfer.weights.weight import LinearOptions, Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class Stage(Decoder):
    """Consecutive layers of a model, in the interface of a whole one.

    The input of a stage without the first layer is ``hidden`` of the batch. Stages without the last layer compute no
    logits. If layers have inputs of their own, each stage has the embedding, from which it makes those of its layers.

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

    def _inputs(self, x: Tensor, batch: Batch) -> Tensor | None:
        is_embedding = batch.hidden is None or self.per_layer_inputs is None
        return super()._inputs(x if is_embedding else super().embed(batch), batch)

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        return super().logits(hidden, indices, adapter_ids) if self.is_last else hidden[:0]

    def with_adapters(self, slots: AdapterSlots) -> "Stage":
        return replace(self, adapters=slots)

    def _adapters(self, batch: Batch) -> Sequence[LayerAdapters | None]:
        adapters = super()._adapters(batch)
        return adapters if batch.adapter_ids is None else adapters[self.indices.start : self.indices.stop]


@dataclass(frozen=True, eq=False)
class AbsentWeight(Weight):
    """Embedding or output layer that another stage has."""

    out_features: int

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        raise ValueError("the output layer is in the last stage")

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("the embedding is in the first stage")


class StageLoader(DecoderLoader):
    """Builder of a stage.

    Args:
        reader, max_model_len: see :class:`DecoderLoader`.
        indices: numbers of its layers.
    """

    def __init__(self, reader: LayerReader, max_model_len: int | None, indices: range) -> None:
        super().__init__(reader, max_model_len)
        self._indices = indices

    def stage(self) -> Stage:
        """Read the weights of the stage."""
        config, indices = self._config, self._indices
        is_first, is_last = indices.start == 0, indices.stop == config.num_layers
        has_embedding = is_first or config.per_layer_size > 0
        absent: Weight = AbsentWeight(config.vocab_size)
        embedding = self.embedding() if has_embedding else absent
        head = absent
        if is_last:
            head = self.lm_head() or (embedding if has_embedding else self.embedding())
        return Stage(
            config=config,
            dtype=self._reader.precision.dtype,
            exact=self._reader.precision.exact,
            embedding=embedding,
            layers=self.layers(indices),
            norm=self.norm(),
            lm_head=head,
            embedding_norm=self.embedding_norm() if has_embedding else None,
            position_embedding=self.position_embedding() if is_first else None,
            per_layer_inputs=self.per_layer_inputs(indices),
            indices=indices,
        )
