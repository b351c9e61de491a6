"""Reading of the fields of ``config.json`` that only Gemma 4 has, as ``Gemma4TextConfig`` of transformers does."""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, KVShape, ModelConfig
from fastinfer.models.hf_rope import local_theta, proportional_rope
from fastinfer.models.structure import shared_kv_layers

# Full layers have other heads, and a rotary table of another width.
FULL_HEAD_DIM = 512
FULL_ROPE: dict[str, object] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
LOCAL_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 1e4}


def prepare_gemma4(fields: JsonFields) -> None:
    """Bring the fields into the form in which other families have them.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointFormatError: a value is out of range.
    """
    values = fields.values
    if values.get("use_bidirectional_attention") not in (None, "vision"):  # no matter for text
        got = values["use_bidirectional_attention"]
        raise UnsupportedModelError(
            f"{fields.path}: use_bidirectional_attention must be null or 'vision', got {got!r:.80}"
        )
    if not fields.get("use_sliding_window", bool, True):
        raise UnsupportedModelError(f"{fields.path}: use_sliding_window must be true, got false")
    fields.get("sliding_window", int, minimum=1, maximum=MAX_SIZE)
    if fields.get("enable_moe_block", bool, False):
        values["num_experts_per_tok"] = values.get("top_k_experts")
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.get(key, int, minimum=1, maximum=MAX_SIZE)
    else:
        values.update(num_experts=None, moe_intermediate_size=None)


def gemma4_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what only this family has.

    Args:
        fields: the fields.
        config: the configuration without it.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        CheckpointFormatError: a value is out of range.
    """
    path, num_layers = fields.path, config.num_layers
    windows = (*config.windows[:-1], 0)  # transformers gives the last layer full attention always
    shapes = _shapes(fields, config, windows)
    full = shapes[-1].head_dim
    num_shared = fields.get("num_kv_shared_layers", int, 0, minimum=0, maximum=num_layers - 1)
    first = num_layers - num_shared
    kv_layers = shared_kv_layers(windows, num_shared)
    if kv_layers is None or any(shapes[layer] != shapes[source] for layer, source in enumerate(kv_layers)):
        raise CheckpointFormatError(
            f"{path}: num_kv_shared_layers: expected layers with keys and values of each kind before the last "
            f"{num_shared}, got none"
        )
    dense_layers, dense_size = frozenset[int](), 0
    if config.num_experts:
        dense_size = fields.get("intermediate_size", int, minimum=1, maximum=MAX_SIZE)
    if num_shared and fields.get("use_double_wide_mlp", bool, False):
        if config.num_experts:
            raise UnsupportedModelError(f"{path}: use_double_wide_mlp must be false with enable_moe_block, got true")
        dense_layers, dense_size = frozenset(range(first, num_layers)), 2 * config.intermediate_size
    tied = fields.get("attention_k_eq_v", bool, False)
    theta, scaling = proportional_rope(fields, FULL_ROPE, full)
    return replace(
        config,
        dense_intermediate_size=dense_size,
        dense_layers=dense_layers,
        mlp_beside_experts=config.num_experts > 0,
        rotary_dim=full,
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta(fields, LOCAL_ROPE),
        local_rotary_dim=config.head_dim,
        windows=windows,
        kv_shapes=shapes,
        kv_layers=kv_layers if num_shared else (),
        tied_kv_layers=frozenset(layer for layer in range(first) if tied and not windows[layer]),
        per_layer_size=_per_layer_size(fields, config),
        attention_scale=1.0,
        attention_softcap=0.0,
    )


def _shapes(fields: JsonFields, config: ModelConfig, windows: tuple[int, ...]) -> tuple[KVShape, ...]:
    """Return the shape of each layer's keys and values, which is one for each kind of layer."""
    path, local = fields.path, KVShape(config.num_kv_heads, config.head_dim)
    heads = config.num_kv_heads
    if fields.get("attention_k_eq_v", bool, False):
        heads = fields.get("num_global_key_value_heads", int, heads, minimum=1, maximum=MAX_SIZE)
    full = KVShape(heads, fields.get("global_head_dim", int, FULL_HEAD_DIM, minimum=1, maximum=MAX_SIZE))
    by_layer = fields.object("per_layer_config")
    if by_layer is None:
        shapes = tuple(local if window else full for window in windows)
    else:
        # With more than ten layers the key of the sixth one is "05".
        by_layer.values = {key.lstrip("0") or "0": value for key, value in by_layer.values.items()}
        shapes = tuple(_shape(by_layer, layer, local) for layer in range(config.num_layers))
        full = shapes[-1]
    for layer, shape in enumerate(shapes):
        expected = local if windows[layer] else full
        if shape != expected:
            raise UnsupportedModelError(
                f"{path}: per_layer_config must give layers of one kind the same heads, expected {expected.num_heads} "
                f"of {expected.head_dim} in layer {layer}, got {shape.num_heads} of {shape.head_dim}"
            )
    if config.num_heads % full.num_heads:
        raise CheckpointFormatError(
            f"{path}: expected a multiple of {full.num_heads} query heads, got {config.num_heads}"
        )
    if local.head_dim % 2 or full.head_dim % 2:
        raise CheckpointFormatError(
            f"{path}: the sizes of heads must be even, got {local.head_dim} and {full.head_dim}"
        )
    return shapes


def _shape(by_layer: JsonFields, layer: int, local: KVShape) -> KVShape:
    """Return the shape of one layer by what a file says of it."""
    own = by_layer.object(str(layer))
    if own is None:
        return local
    if unknown := own.values.keys() - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModelError(f"{own.path}: per_layer_config: {sorted(unknown)[0]} is not implemented")
    sizes = {"minimum": 1, "maximum": MAX_SIZE}
    return KVShape(
        own.get("num_key_value_heads", int, local.num_heads, **sizes), own.get("head_dim", int, local.head_dim, **sizes)
    )


def _per_layer_size(fields: JsonFields, config: ModelConfig) -> int:
    size = fields.get("hidden_size_per_layer_input", int, 0, minimum=0, maximum=MAX_SIZE)
    if size and not config.activation.startswith("gelu"):
        raise UnsupportedModelError(
            f"{fields.path}: hidden_activation must be a gelu with hidden_size_per_layer_input, got {config.activation}"
        )
    if size:
        rows = fields.get("vocab_size_per_layer_input", int, config.vocab_size)
        if rows != config.vocab_size:
            raise UnsupportedModelError(
                f"{fields.path}: vocab_size_per_layer_input must be vocab_size = {config.vocab_size}, got {rows}"
            )
    return size
