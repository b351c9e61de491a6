"""Reading of the metadata that only GGUF files of Gemma 4 have."""

from dataclasses import replace

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, KVShape, ModelConfig
from fastinfer.models.gguf_fields import sizes_by_layer, windows_by_layer
from fastinfer.models.structure import shared_kv_layers

PREFIX = "gemma4"


def gemma4_sizes(file: GGUFFile) -> dict[str, int]:
    """Return the sizes of layers with a window by their keys in files of other architectures.

    Raises:
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    windows = windows_by_layer(file, PREFIX)
    layer = next((layer for layer, window in enumerate(windows) if window), 0)
    key = "key_length_swa" if any(windows) else "key_length"
    head_dim = file.get(f"{PREFIX}.attention.{key}", int, minimum=1, maximum=MAX_SIZE)
    return {
        "attention.head_count_kv": sizes_by_layer(file, PREFIX, "attention.head_count_kv")[layer],
        "attention.key_length": head_dim,
        "feed_forward_length": sizes_by_layer(file, PREFIX, "feed_forward_length")[0],
        "rope.dimension_count": head_dim,
    }


def gemma4_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what only this architecture has.

    Args:
        file: the file.
        config: the configuration without it.

    Raises:
        UnsupportedModelError: a setting is not implemented.
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    num_layers, windows = config.num_layers, windows_by_layer(file, PREFIX)
    heads, inner = (sizes_by_layer(file, PREFIX, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    full = file.get(f"{PREFIX}.attention.key_length", int, minimum=1, maximum=MAX_SIZE)
    shapes = tuple(
        KVShape(count, config.head_dim if window else full) for count, window in zip(heads, windows, strict=True)
    )
    for layer, shape in enumerate(shapes):
        if config.num_heads % shape.num_heads or shape.head_dim % 2:
            raise GGUFFormatError(
                f"{file.path}: expected an even size of heads and a divisor of {config.num_heads} query heads in layer "
                f"{layer}, got {shape.num_heads} of {shape.head_dim}"
            )
    for key, sizes in (("dimension_count", full), ("dimension_count_swa", config.head_dim)):
        rotated = file.get(f"{PREFIX}.rope.{key}", int, sizes, minimum=1)
        if rotated != sizes:
            raise UnsupportedModelError(f"{file.path}: {PREFIX}.rope.{key} must be {sizes}, got {rotated}")
    num_shared = file.get(f"{PREFIX}.attention.shared_kv_layers", int, 0, minimum=0, maximum=num_layers - 1)
    kv_layers = shared_kv_layers(windows, num_shared)
    if kv_layers is None or any(shapes[layer] != shapes[source] for layer, source in enumerate(kv_layers)):
        raise GGUFFormatError(
            f"{file.path}: {PREFIX}.attention.shared_kv_layers: expected layers with keys and values of each kind "
            f"before the last {num_shared}, got none"
        )
    if not all(windows) and "rope_freqs.weight" not in file.tensors:  # which part of a head is rotated
        raise GGUFFormatError(f"{file.path}: tensor 'rope_freqs.weight' is missing")
    wide = frozenset(layer for layer in range(num_layers) if inner[layer] != inner[0])
    widths = {inner[layer] for layer in wide}
    if len(widths) > 1 or (wide and config.num_experts):
        raise UnsupportedModelError(
            f"{file.path}: {PREFIX}.feed_forward_length must have at most two sizes, got {inner}"
        )
    return replace(
        config,
        dense_layers=wide,
        dense_intermediate_size=inner[0] if config.num_experts else max(widths, default=0),
        mlp_beside_experts=config.num_experts > 0,
        rotary_dim=full,
        local_rope_theta=file.get(f"{PREFIX}.rope.freq_base_swa", float, 10000.0, minimum=1.001),
        local_rotary_dim=config.head_dim,
        windows=windows,
        kv_shapes=shapes,
        kv_layers=kv_layers if num_shared else (),
        tied_kv_layers=frozenset(
            layer for layer in range(num_layers - num_shared) if f"blk.{layer}.attn_v.weight" not in file.tensors
        ),
        per_layer_size=file.get(f"{PREFIX}.embedding_length_per_layer_input", int, 0, minimum=0, maximum=MAX_SIZE),
        attention_scale=1.0,
    )
