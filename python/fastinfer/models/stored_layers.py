"""Layers of a file that are not one layer of attention or state and one MLP each."""

from collections.abc import Sequence

from fastinfer.errors import UnsupportedModelError

MLPS = ("mlp", "moe")
# See fastinfer.models.config.ModelConfig.
StoredLayers = tuple[tuple[int, int | None], ...]


def joined_layers(kinds: Sequence[str], where: str) -> StoredLayers:
    """Join each MLP to the layer before it, in a file whose layers have one part each.

    Args:
        kinds: kinds of the file's layers; those in ``MLPS`` are MLPs.
        where: beginning of the message of an error.

    Raises:
        UnsupportedModelError: there is no attention or state before an MLP.
    """
    layers: list[tuple[int, int | None]] = []
    for number, kind in enumerate(kinds):
        if kind not in MLPS:
            layers.append((number, None))
        elif layers and layers[-1] == (number - 1, None):
            layers[-1] = number - 1, number
        else:
            raise UnsupportedModelError(
                f"{where}: expected attention or Mamba-2 before each MLP, got {kind} at {number}"
            )
    return tuple(layers)


def split_layers(num_layers: int) -> StoredLayers:
    """Split each layer of a file into a layer with a state and one with attention beside it and the MLP."""
    return tuple(layer for number in range(num_layers) for layer in ((number, None), (number, number)))
