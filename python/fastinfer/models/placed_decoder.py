"""A decoder whose layers are on several devices of one process.

The device of the first layers also has the embedding, the output layer and the inputs of a step, and gets the hidden
states back. The other places get copies of the inputs, and hidden states from the place before.
"""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.layer_places import LayerPlace
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.moves import moved
from fastinfer.utils.torch_threads import one_torch_thread
from fastinfer.weights.expert_weights import ExpertWeights


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedDecoder(Decoder):
    """A decoder whose layers are on several devices.

    Attributes:
        places: the places of all layers in order.
    """

    places: tuple[LayerPlace, ...]

    @property
    def layer_devices(self) -> list[str]:
        """Device of each layer, and of its cache."""
        return [place.device for place in self.places for _ in place.layers]

    def _compute(self, indices: range, x: Tensor, inputs: Tensor | None, batch: Batch, kv_cache: KVCache) -> Tensor:
        first = last = self.places[0]
        for place in self.places:
            layers = range(max(place.layers.start, indices.start), min(place.layers.stop, indices.stop))
            if not layers:
                continue
            last, own_inputs, own_batch = place, inputs, batch
            if place is not first:
                x, own_inputs, own_batch = moved((x, inputs, batch), place.device)
            x = super()._compute(layers, x, own_inputs, own_batch, kv_cache)
        return x if last is first else moved(x, first.device)


class PlacedReader(LayerReader):
    """Reader of the layers of a place.

    Args:
        checkpoint: an open checkpoint.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`.
        place: the place.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, place: LayerPlace) -> None:
        super().__init__(checkpoint, Precision.of(dtype, place.device), place.device)
        self.experts_device = place.experts
        self._of_experts: LayerReader = self
        if place.experts is not None:
            self._of_experts = LayerReader(checkpoint, Precision.of(dtype, place.experts), place.experts)

    def make_experts(self, unpacked: list[Unpacked], bias: Tensor | None = None) -> ExpertWeights:
        return LayerReader.make_experts(self._of_experts, unpacked, bias)


def load_placed(
    places: tuple[LayerPlace, ...], checkpoint: Checkpoint, dtype: str, device: str, max_model_len: int | None
) -> PlacedDecoder:
    """Load a model whose layers are on several devices.

    Args:
        places: the places of all layers in order.
        checkpoint: an open checkpoint.
        dtype: name of the dtype, see :meth:`fastinfer.models.config.Precision.of`; it must mean the same hidden states
            on all devices.
        device: device of the first place.
        max_model_len: length of the longest sequence in tokens; ``None`` for the model's own limit.

    Raises:
        FastinferError: as for :func:`fastinfer.models.load_weights`.
    """
    assert device == places[0].device
    with one_torch_thread():
        decoder = PlacedLoader(places, checkpoint, dtype, max_model_len).decoder()
        return PlacedDecoder(places=places, **vars(decoder))


class PlacedLoader(DecoderLoader):
    """Builder of the decoder; the arguments are those of :func:`load_placed`."""

    def __init__(
        self, places: tuple[LayerPlace, ...], checkpoint: Checkpoint, dtype: str, max_model_len: int | None
    ) -> None:
        first, *others = (PlacedReader(checkpoint, dtype, place) for place in places)
        super().__init__(first, max_model_len)
        self._own, *rest = places
        loaders = [DecoderLoader(reader, max_model_len) for reader in others]
        self._others = list(zip(rest, loaders, strict=True))

    def layers(self, indices: range) -> tuple[DecoderLayer, ...]:
        layers = super().layers(self._own.layers)
        return sum((loader.layers(place.layers) for place, loader in self._others), layers)
