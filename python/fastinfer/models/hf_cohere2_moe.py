"""Reading of the fields of config.json that only Cohere 2's mixtures of experts have."""

from dataclasses import replace

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, ModelConfig, RouterConfig
from fastinfer.models.hf_states import FULL, SLIDING
from fastinfer.models.structure import Structure


def prepare_cohere2_moe(fields: JsonFields) -> None:
    """Add the kinds of the layers if the file does not say them, and the widths by the names of other families."""
    values = fields.values
    inner = values.get("intermediate_size")
    dense_inner = values.get("prefix_dense_intermediate_size")
    values |= {"moe_intermediate_size": inner, "intermediate_size": inner if dense_inner is None else dense_inner}
    if fields.get("layer_types", list, []):
        return
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    num_dense = fields.get("first_k_dense_replace", int, 0, minimum=0, maximum=count)
    dense_period = fields.get("prefix_dense_sliding_window_pattern", int, minimum=1)
    period = fields.get("sliding_window_pattern", int, minimum=1)
    # Both count from the first of their layers.
    kinds = [SLIDING if (layer + 1) % dense_period else FULL for layer in range(num_dense)]
    kinds += [SLIDING if (layer + 1) % period else FULL for layer in range(count - num_dense)]
    values["layer_types"] = kinds


def cohere2_moe_structure(fields: JsonFields, structure: Structure) -> Structure:
    """Return the structure of the layers, whose norms depend on which ``eps`` there is."""
    return structure if fields.values.get("rms_norm_eps") is None else replace(structure, norm="rms_norm")


def cohere2_moe_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the choice of experts, the share of all experts and the layers without rotation.

    Raises:
        UnsupportedModelError: the choice of experts or their combination is not implemented.
    """
    scoring = _one_of(fields, "expert_selection_fn", ("softmax", "sigmoid"))
    strategy = _one_of(fields, "shared_expert_combination_strategy", ("average", "sum"))
    is_average = strategy == "average" and config.shared_intermediate_size > 0
    unrotated = config.unrotated_layers
    if fields.get("prefix_dense_sliding_window_pattern", int) == 1:
        unrotated -= config.dense_layers
    return replace(
        config,
        # The weights of the chosen experts are their softmax alone.
        router=RouterConfig(scoring, renormalize=scoring == "softmax" or fields.get("norm_topk_prob", bool)),
        experts_scale=0.5 if is_average else 1.0,
        unrotated_layers=unrotated,
    )


def _one_of(fields: JsonFields, key: str, known: tuple[str, ...]) -> str:
    value = fields.get(key, str)
    if value not in known:
        raise UnsupportedModelError(f"{fields.path}: {key} must be {' or '.join(known)}, got {value!r:.80}")
    return value
