"""Configuration of the layers for multi-token prediction in a checkpoint (MTP, also called nextn)."""

from dataclasses import replace
from pathlib import Path

from fastinfer.errors import RequestError
from fastinfer.models.config import ModelConfig


def mtp_config(config: ModelConfig, stored_layers: range) -> ModelConfig:
    """Return the configuration of a draft head that is further layers of a model, with attention to the whole text.

    Args:
        config: configuration of the model. It has no windows, and its layers with attention have one shape.
        stored_layers: numbers of the layers in the file.
    """
    return replace(
        config,
        num_layers=len(stored_layers),
        state_layers=(),
        states=None,
        dense_layers=frozenset(),
        stored_layers=tuple((layer, layer) for layer in stored_layers),
        has_features=True,
    )


def no_mtp_layer(path: Path) -> RequestError:
    """Return the error for a checkpoint without such a layer."""
    return RequestError(f"{path}: a model that drafts for itself needs a layer for multi-token prediction, got none")
