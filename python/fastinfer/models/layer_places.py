"""Division of a model's layers among the places of one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fastinfer.errors import RequestError
from fastinfer.models.config import ModelConfig
from fastinfer.utils.places import Place


@dataclass(frozen=True)
class LayerPlace:
    """Place of consecutive layers.

    Attributes:
        layers: the layers.
        device: device of these layers, of their caches and of their computation.
        experts: device of the weights of their routed experts, which also computes the products with them; ``None`` if
            it is that of the layers.
    """

    layers: range
    device: str
    experts: str | None = None

    @property
    def devices(self) -> list[str]:
        """Both devices, that of the layers first."""
        return [self.device] if self.experts is None else [self.device, self.experts]


def place_layers(config: ModelConfig, places: Sequence[Place], shares: Sequence[float]) -> tuple[LayerPlace, ...]:
    """Divide the layers among places, in proportion to their shares as far as layers can be separated.

    Each place gets a layer, however small its share is.

    Args:
        config: configuration of the model.
        places: the places, in the order of the layers.
        shares: share of each place; those that the places have themselves are ignored.

    Raises:
        RequestError: there are more places than layers that can be separated, or a place has a device for experts and
            the model has none.
    """
    for place in places:
        if place.experts is not None and not config.num_experts:
            raise RequestError(f"device: {place.device}+{place.experts} needs a model with experts, got one without")
    ends = possible_ends(config)
    if len(places) > len(ends):
        raise RequestError(f"device: expected at most {len(ends)} places for the model's layers, got {len(places)}")
    total, placed, start = sum(shares), list[LayerPlace](), 0
    for number, (place, sum_) in enumerate(zip(places, accumulate(shares), strict=True), 1):
        ideal = config.num_layers * sum_ / total
        for_others = len(places) - number
        candidates = [end for end in ends[: len(ends) - for_others] if end > start]
        end = min(candidates, key=lambda end: abs(end - ideal)) if for_others else config.num_layers
        placed.append(LayerPlace(range(start, end), place.device, place.experts))
        start = end
    return tuple(placed)


def possible_ends(config: ModelConfig) -> list[int]:
    """Return the numbers of layers after which a place or a stage may end, in ascending order.

    A layer stays with the one whose keys and values it attends to, with the one whose input it shares, and with the one
    whose indexer chooses its tokens.
    """
    count = config.num_layers
    tied = [range(config.kv_layer(layer) + 1, layer + 1) for layer in range(count)]
    if config.indexer is not None:
        tied += [range(source + 1, layer + 1) for layer, source in enumerate(config.indexer.layers)]
    refused = {end for ends in tied for end in ends} | set(filter(config.is_parallel, range(count)))
    return [end for end in range(1, count + 1) if end not in refused]
