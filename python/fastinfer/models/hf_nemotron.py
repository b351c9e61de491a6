"""The layers of Nemotron-H, from ``config.json``.

A layer of the file has one part: attention, Mamba-2, an MLP or experts. Here an MLP or experts belong to the layer of
attention or Mamba-2 before them.
"""

import math
from dataclasses import replace
from typing import Any

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_fields import Sizes, require
from fastinfer.models.hf_states import FULL, MAMBA, Mamba2Names, mamba2
from fastinfer.models.state_config import Mamba2Config
from fastinfer.models.stored_layers import MLPS, StoredLayers, joined_layers

_KINDS = {"M": MAMBA, "*": FULL, "-": "mlp", "E": "moe", "mamba": MAMBA, "attention": FULL}
_NAMES = Mamba2Names(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state_dim="ssm_state_size",
    num_groups="n_groups",
    kernel_size="conv_kernel",
    conv_bias="use_conv_bias",
    projection_bias="use_bias",
)


def prepare_nemotron_h(fields: JsonFields) -> StoredLayers:
    """Give the fields the names and meanings that those of other families have.

    Returns:
        See :attr:`fastinfer.models.config.ModelConfig.stored_layers`.

    Raises:
        UnsupportedModelError: one of the settings is not implemented.
        CheckpointFormatError: a value is missing or out of range.
    """
    for key, expected in (
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("sliding_window", None),
    ):
        require(fields, key, expected)
    kinds = _kinds(fields)
    layers = joined_layers(kinds, f"{fields.path}: layers_block_type")
    size = Sizes(fields)
    has_experts = "moe" in kinds
    shared = size("moe_shared_expert_intermediate_size") if has_experts else None
    fields.values |= {
        "num_hidden_layers": len(layers),
        "layer_types": [kinds[number] for number, _ in layers],
        "mlp_only_layers": [layer for layer, (_, mlp) in enumerate(layers) if mlp is None or kinds[mlp] == "mlp"],
        "shared_expert_intermediate_size": shared,
    }
    if not has_experts:
        fields.values |= dict.fromkeys(("n_routed_experts", "moe_intermediate_size", "n_group", "topk_group"))
    return layers


def nemotron_h_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the width of the experts' inputs, which may be projections of hidden states."""
    size = Sizes(fields)("moe_latent_size", 0) if config.num_experts else 0
    return replace(config, expert_latent_size=size)


def nemotron_h_mamba2(fields: JsonFields, size: Sizes) -> Mamba2Config:
    """Return the sizes of the Mamba-2 layers; transformers takes the least time step as limit, and no largest one."""
    least_step = fields.get("time_step_min", float, minimum=0.0, maximum=1e3)
    return mamba2(fields, size, _NAMES, size(_NAMES.head_dim), (least_step, math.inf))


def _kinds(fields: JsonFields) -> list[str]:
    """Return the kinds of the file's layers."""
    listed: list[Any] | None = fields.get("layers_block_type", list, None) or fields.get("layer_types", list, None)
    if listed is None:
        listed = list(fields.get("hybrid_override_pattern", str))
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in listed]
    known = {MAMBA, FULL, *MLPS}
    if not kinds or not known.issuperset(kinds):
        raise CheckpointFormatError(
            f"{fields.path}: layers_block_type: expected {', '.join(sorted(known))}, got {listed!r:.80}"
        )
    return kinds
