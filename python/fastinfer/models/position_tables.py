"""Tables that layers look up by position: rotations, and factors of queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class PositionTables:
    """The tables of all layers, which share them.

    Attributes:
        full, local: [positions, rotary_dim] fp32, the rotary tables of the layers without and with a window, which are
            often the same.
        unrotated: [positions, 2] fp32, rotations by an angle of 0; of all rotated elements with latent attention.
        query_scales: [positions] fp32, factors of queries; ``None`` if they are all 1.
    """

    full: Tensor
    local: Tensor
    unrotated: Tensor
    query_scales: Tensor | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, positions: int, device: str) -> "PositionTables":
        """Compute the tables of a model.

        Raises:
            UnsupportedModelError: the settings of the rotations make no table.
        """
        config = checkpoint.config
        # Rotation by an angle of 0. Queries and keys of latent attention have no elements behind the rotated ones.
        pairs = config.rotary_dim // 2 if config.latent_attention is not None else 1
        unrotated = torch.tensor([[1.0] * pairs + [0.0] * pairs], dtype=torch.float32).repeat(positions, 1).to(device)
        full = local = unrotated
        if config.rotary_dim:
            full, local = _cos_sin_caches(checkpoint, positions, device)
        query_scales = _growing_query_scales(config, positions)
        return cls(full, local, unrotated, None if query_scales is None else query_scales.to(device))


def _cos_sin_caches(checkpoint: Checkpoint, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """Compute the rotary tables of the layers without and with a window, which are often the same."""
    config, factors = checkpoint.config, None
    if "rope_factors" in checkpoint:
        # There are as many as the layers that rotate most elements have pairs.
        stored = checkpoint.vector("rope_factors", max(config.rotary_dim, config.local_rotary_dim) // 2)
        factors = stored[: config.rotary_dim // 2]
    sizes = config.rotary_dim, positions
    try:
        table = ops.cos_sin_cache(*sizes, config.rope_theta, config.rope_scaling, factors)
    except (ValueError, ArithmeticError) as error:  # logarithms and quotients of a damaged file's numbers
        raise UnsupportedModelError(f"{checkpoint.path}: rotary scaling: {error}") from None
    tables = [table]
    if config.local_rope_theta is not None:
        local = config.local_rotary_dim or config.rotary_dim
        tables.append(ops.cos_sin_cache(local, positions, config.local_rope_theta))
    if config.reversed_rope:
        for table in tables:
            table.chunk(2, dim=-1)[1].neg_()  # the sines
    tables = [table.to(device) for table in tables]
    return tables[0], tables[-1]


def _growing_query_scales(config: ModelConfig, positions: int) -> Tensor | None:
    """Compute the factors of queries at each position; ``None`` if they are all 1."""
    if not config.query_growth:
        return None
    steps = (torch.arange(positions) + config.query_offset) // config.query_length
    return (1 + config.query_growth * steps.double().log1p()).float()
