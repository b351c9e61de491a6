"""Kinds of the layers in ``config.json``: windows, states, rotations, experts."""

from collections.abc import Callable

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE
from fastinfer.models.families import Family
from fastinfer.models.hf_fields import require
from fastinfer.models.hf_states import FULL, SLIDING, is_rotated, layers_of_kind, mamba_layers, short_conv_layers
from fastinfer.models.structure import EXAONE4, EXAONE_MOE, LFM3, NEMOTRON_H, periodic_windows


def attention_windows(fields: JsonFields, name: str, family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the length of each layer's attention window in positions, 0 for none."""
    if "sliding_window" not in family.defaults:
        return ()
    if "use_sliding_window" in fields.values and not fields.get("use_sliding_window", bool, False):
        return ()
    window = fields.get("sliding_window", int, 0, minimum=1, maximum=MAX_SIZE)
    if not window:
        return ()
    kinds = fields.get("layer_types", list, [])
    if kinds:
        if len(kinds) != num_layers or not {str(k) for k in kinds} <= {"sliding_attention", "full_attention"}:
            raise CheckpointFormatError(
                f"{fields.path}: layer_types: expected {num_layers} of sliding_attention and full_attention, "
                f"got {kinds!r:.80}"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    # Older files have no layer_types; these are the rules in the families' own code.
    if is_windowed := _windowed_layers(fields, name, num_layers):
        return tuple(window if is_windowed(layer) else 0 for layer in range(num_layers))
    if isinstance(fields.values.get("sliding_window_pattern"), str):
        return tuple(window if is_local else 0 for is_local in _local_layers(fields, num_layers))
    period = fields.get("sliding_window_pattern", int, family.structure.window_period, minimum=1)
    return periodic_windows(window, period, num_layers)


def require_window(fields: JsonFields) -> None:
    """Refuse a file without the length of windows that some of its layers have.

    Raises:
        CheckpointFormatError: it has none.
    """
    if SLIDING in fields.get("layer_types", list, [SLIDING]) and fields.values.get("sliding_window") is None:
        raise CheckpointFormatError(f"{fields.path}: sliding_window is missing")


def _local_layers(fields: JsonFields, num_layers: int) -> list[bool]:
    """Return which layers have a window by a pattern of letters that repeats, as in EXAONE 4: local and global.

    The last layer has none, whatever its letter.
    """
    pattern = fields.get("sliding_window_pattern", str)
    if not pattern or not set(pattern) <= {"L", "G"}:
        raise CheckpointFormatError(
            f"{fields.path}: sliding_window_pattern: expected letters L and G, got {pattern!r:.80}"
        )
    return [pattern[layer % len(pattern)] == "L" and layer < num_layers - 1 for layer in range(num_layers)]


def _windowed_layers(fields: JsonFields, name: str, num_layers: int) -> Callable[[int], bool] | None:
    """Return which layers have a window; None where it is every layer, or all but each n-th."""
    if name in ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM", "CwmForCausalLM"):
        return lambda layer: layer % 4 != 0
    if name == "MuseGlimmerForConditionalGeneration":
        full = _muse_glimmer_full_layers(num_layers)
        return lambda layer: layer not in full
    if name == "SmolLM3ForCausalLM":
        return _smollm3_unrotated_layers(fields, num_layers).__contains__
    if "max_window_layers" in fields.values:
        first = fields.get("max_window_layers", int, num_layers, minimum=0)
        if name == "Qwen2MoeForCausalLM":
            return lambda layer: layer % 2 == 0 and layer < first
        return lambda layer: layer >= first
    return None


def state_layers(fields: JsonFields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has a state instead of keys and values; empty for a family without such layers."""
    if family.structure.short_convs:
        return short_conv_layers(fields, num_layers, (FULL, SLIDING) if family.structure is LFM3 else (FULL,))
    if family.structure.mamba2:
        return mamba_layers(fields, num_layers)
    period = family.structure.linear_period
    if not period:
        return ()
    if family.structure.output_gate:
        require(fields, "attn_output_gate", True)
    period = fields.get("full_attention_interval", int, period, minimum=1)
    linear = "linear_attention"
    default = [linear if (layer + 1) % period else FULL for layer in range(num_layers)]
    kinds = fields.get("layer_types", list, None) or default
    return layers_of_kind(fields, linear, kinds, num_layers)


def unrotated_layers(
    fields: JsonFields, name: str, family: Family, windows: tuple[int, ...], num_layers: int
) -> frozenset[int]:
    """Return the layers whose queries and keys are not rotated."""
    if name in ("SmolLM3ForCausalLM", "Llama4ForCausalLM"):
        return _smollm3_unrotated_layers(fields, num_layers)
    # Without any window, too, but EXAONE's models rotate all layers if there is no length of one.
    is_plain = family.structure in (EXAONE4, EXAONE_MOE) and fields.values.get("sliding_window") is None
    if family.structure.only_windows_rotate and "sliding_window" in family.defaults and not is_plain:
        return frozenset(layer for layer in range(num_layers) if not (windows and windows[layer]))
    if name == "MuseGlimmerForConditionalGeneration":
        if fields.values.get("layer_rope_theta") is None:
            return _muse_glimmer_full_layers(num_layers)
        # All other layers have the base of rope_parameters, whatever the list says.
        thetas = fields.numbers("layer_rope_theta", num_layers)
        return frozenset(layer for layer, theta in enumerate(thetas) if not theta)
    if family.structure is NEMOTRON_H or (name == "GraniteMoeHybridForCausalLM" and not is_rotated(fields)):
        return frozenset(range(num_layers))
    return family.structure.unrotated_layers(windows)


def _muse_glimmer_full_layers(num_layers: int) -> frozenset[int]:
    """Return every fourth layer, counted back from the last: they see the whole text and are not rotated."""
    return frozenset(range(num_layers - 1, -1, -4))


def _smollm3_unrotated_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    interval = fields.get("no_rope_layer_interval", int, 4, minimum=1)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotates = fields.get("no_rope_layers", list, None) or default
    if len(rotates) != num_layers or not all(flag in (0, 1) for flag in rotates):
        raise CheckpointFormatError(
            f"{fields.path}: no_rope_layers: expected {num_layers} numbers 0 or 1, got {rotates!r:.80}"
        )
    return frozenset(layer for layer, flag in enumerate(rotates) if not flag)


def dense_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """Return the layers of a model with experts that have none."""
    first = fields.get("first_k_dense_replace", int, 0, minimum=0, maximum=MAX_SIZE)
    first = fields.get("num_dense_layers", int, first, minimum=0, maximum=MAX_SIZE)
    step = fields.get("decoder_sparse_step", int, 1, minimum=1)
    listed = fields.get("mlp_only_layers", list, [])
    require(fields, "moe_layer_freq", 1)
    if kinds := fields.get("mlp_layer_types", list, []):
        if len(kinds) != num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise CheckpointFormatError(
                f"{fields.path}: mlp_layer_types: expected {num_layers} of dense and sparse, got {kinds!r:.80}"
            )
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    return frozenset(layer for layer in range(num_layers) if layer < first or (layer + 1) % step or layer in listed)
