"""Scaling of rotary frequencies and growth of queries with their position, from the metadata of a GGUF file."""

import math

from fastinfer import ops
from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE
from fastinfer.models.gguf_architectures import ARCHITECTURES


def rope_scaling(file: GGUFFile, architecture: str, context_length: int, num_factors: int) -> ops.RopeScaling:
    """Return the scaling, for heads with ``num_factors`` rotated pairs of elements."""
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{file.path}: rotary scaling {kind!r} is not implemented; supported are none, linear, longrope, yarn"
        )
    if "rope_factors_long.weight" in file.tensors:
        kind = "longrope"
    if kind == "longrope":
        return _longrope(file, prefix, context_length, num_factors)
    length = f"{prefix}.original_context_length"
    trained = file.get(length, int, minimum=1, maximum=MAX_SIZE) if kind == "yarn" else 0
    factor = file.get(f"{prefix}.factor", float, 1.0, minimum=1e-3)
    return ops.RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=trained,
        beta_fast=file.get(f"{prefix}.yarn_beta_fast", float, 32.0, minimum=1e-3),
        beta_slow=file.get(f"{prefix}.yarn_beta_slow", float, 1.0, minimum=1e-3),
        attention_factor=_yarn_attention_factor(file, architecture, factor),
        truncate=ARCHITECTURES[architecture].truncated_yarn,
    )


def _yarn_attention_factor(file: GGUFFile, architecture: str, factor: float) -> float | None:
    """Return the factor on cos and sin; ``None`` for the usual one."""
    growth = file.get(f"{architecture}.rope.scaling.yarn_log_multiplier", float, 0.0, minimum=0.0)
    if not growth:
        return None
    if ARCHITECTURES[architecture].structure.latent_attention:
        return 1.0  # it is in the scale of the logits instead
    logarithm = 0.1 * math.log(max(factor, 1.0))
    return (1.0 + logarithm) / (1.0 + growth * logarithm)


def query_growth(file: GGUFFile, architecture: str, context_length: int) -> tuple[float, int]:
    """Return ``query_growth`` and ``query_length``, see :class:`fastinfer.models.config.ModelConfig`."""
    growth = file.get(f"{architecture}.attention.temperature_scale", float, 0.0, minimum=0.0)
    if not growth:
        return 0.0, 1
    length = context_length
    for key in ("rope.scaling.original_context_length", "attention.temperature_length"):  # the last one counts
        length = file.get(f"{architecture}.{key}", int, length, minimum=1, maximum=MAX_SIZE)
    return growth, length


def _longrope(file: GGUFFile, prefix: str, context_length: int, num_factors: int) -> ops.RopeScaling:
    trained = file.get(f"{prefix}.original_context_length", int, context_length, minimum=2, maximum=MAX_SIZE)
    factors = []
    for name in ("rope_factors_short.weight", "rope_factors_long.weight"):
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != (num_factors,) or tensor.type.name != "F32":
            got = "none" if tensor is None else f"{list(tensor.shape)} {tensor.type.name}"
            raise GGUFFormatError(f"{file.path}: tensor {name!r} must be {num_factors} F32 numbers, got {got}")
        factors.append(tuple(float(value) for value in tensor.data.reshape(-1).view("<f4")))
    return ops.RopeScaling(
        kind="longrope",
        factor=context_length / trained,
        original_max_position=trained,
        attention_factor=file.get(f"{prefix}.attn_factor", float, None, minimum=0.0),
        short_factors=factors[0],
        long_factors=factors[1],
    )
