"""Experts and their router, from ``config.json``."""

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, RouterConfig
from fastinfer.models.families import Family
from fastinfer.models.hf_fields import Sizes, require


def num_experts(size: Sizes) -> int:
    """Return the number of experts of a layer, 0 for a model without."""
    return size("n_routed_experts", 0) or size("num_local_experts", 0) or size("num_experts", 0)


def prepare_hunyuan_moe(fields: JsonFields) -> None:
    """Add the width of the shared expert, and the number of a token's experts, which the file may say for each layer.

    Raises:
        UnsupportedModelError: the layers differ.
    """
    key = "num_experts_per_tok"
    counts = fields.values[key]
    if isinstance(counts, list):
        if len(set(map(str, counts))) != 1:
            raise UnsupportedModelError(f"{fields.path}: moe_topk must be the same for all layers, got {counts!r:.80}")
        fields.values[key] = counts[0]
    fields.values["shared_intermediate_size"] = fields.values.get("intermediate_size")


def router(fields: JsonFields, family: Family, experts: int) -> RouterConfig:
    """Return how the experts of a token are chosen."""
    renormalize = fields.get("norm_topk_prob", bool, False)
    require(fields, "scoring_func", "sigmoid" if family.sigmoid_router else "softmax")
    if family.sigmoid_router:
        require(fields, "use_routing_bias", True)
        require(fields, "topk_method", "noaux_tc")
    groups = fields.get("n_group", int, 1, minimum=1, maximum=max(1, experts))
    return RouterConfig(
        scoring="sigmoid" if family.sigmoid_router else "softmax",
        has_bias=family.router_bias or (family.sigmoid_router and fields.get("use_expert_bias", bool, True)),
        num_groups=groups,
        top_groups=fields.get("topk_group", int, 1, minimum=1, maximum=groups),
        renormalize=renormalize,
        scale=fields.get("routed_scaling_factor", float, 1.0, minimum=0.0),
    )


def shared_intermediate_size(fields: JsonFields, size: Sizes) -> int:
    """Return the width of the shared expert, 0 for none."""
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if width := fields.get(key, int, 0, minimum=0, maximum=MAX_SIZE):
            return width
    return fields.get("n_shared_experts", int, 0, minimum=0, maximum=64) * size("moe_intermediate_size", 0)
