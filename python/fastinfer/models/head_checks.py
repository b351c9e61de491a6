"""Checks that the readers of draft heads share."""

from pathlib import Path
from typing import Any

from fastinfer.errors import FastinferError, UnsupportedModelError
from fastinfer.models.config import BlockConfig, ModelConfig


def check_layer_ids(name: str, ids: list[Any], path: Path, error: type[FastinferError]) -> None:
    """Refuse numbers of layers that do not ascend.

    Args:
        name: what the file calls them.
        ids: the numbers.
        path: path of the file or folder.
        error: class of the error that is raised.
    """
    if not ids or not all(type(layer) is int for layer in ids) or sorted(set(ids)) != ids:
        raise error(f"{path}: {name} must be ascending numbers, got {ids!r:.80}")


def check_block(block: BlockConfig, config: ModelConfig, path: Path) -> None:
    """Refuse settings of a block that the engine cannot compute, or that do not go together.

    Raises:
        UnsupportedModelError: the settings are of this kind.
    """
    window = min((window for window in config.windows if window), default=block.size)
    if block.has_whole_windows and window < block.size:
        raise UnsupportedModelError(
            f"{path}: sliding_window must be at least the block_size of {block.size}, got {window}"
        )
    if block.conv_taps and config.hidden_size % block.conv_group_size:
        raise UnsupportedModelError(
            f"{path}: conv_group_size must divide the hidden size of {config.hidden_size}, got {block.conv_group_size}"
        )
    if block.selector_rank and config.draft_vocab_size not in (0, config.vocab_size):
        raise UnsupportedModelError(
            f"{path}: draft_vocab_size must be the vocabulary of {config.vocab_size} tokens for a head that selects "
            f"candidates, got {config.draft_vocab_size}"
        )
