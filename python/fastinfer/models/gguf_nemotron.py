"""The layers of Nemotron-H, from the metadata of a GGUF file.

As in ``config.json``, a layer of the file has one part. It is attention in a layer with key and value heads, an MLP or
experts in one with a feed-forward length, and Mamba-2 in one with neither.
"""

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.gguf_fields import sizes_by_layer
from fastinfer.models.stored_layers import StoredLayers, joined_layers


def nemotron_h_layers(
    file: GGUFFile, architecture: str, num_blocks: int
) -> tuple[StoredLayers, tuple[bool, ...], dict[str, int]]:
    """Return the layers, and the sizes that the file has for each block, by their keys.

    Returns:
        ``stored_layers`` and ``state_layers`` of a :class:`fastinfer.models.config.ModelConfig`, and the sizes.

    Raises:
        GGUFFormatError: the sizes contradict each other.
        UnsupportedModelError: the order of the parts is not implemented.
    """
    found = {}
    for key in ("attention.head_count_kv", "feed_forward_length"):
        found[key] = sizes_by_layer(file, architecture, key, minimum=0)[:num_blocks]
        if len({size for size in found[key] if size}) != 1:
            raise GGUFFormatError(
                f"{file.path}: {architecture}.{key}: expected 0 or the same size in all layers, got {found[key]!r:.80}"
            )
    heads, inner = found.values()
    kinds = [
        "attention" if count else "moe" if width and architecture == "nemotron_h_moe" else "mlp" if width else "mamba"
        for count, width in zip(heads, inner, strict=True)
    ]
    if any(count and width for count, width in zip(heads, inner, strict=True)) or "mamba" not in kinds:
        raise GGUFFormatError(
            f"{file.path}: expected {architecture}.attention.head_count_kv or feed_forward_length to be 0 in each "
            f"layer, and both in some, got {heads!r:.80} and {inner!r:.80}"
        )
    layers = joined_layers(kinds, f"{file.path}: {architecture}")
    return (
        layers,
        tuple(kinds[number] == "mamba" for number, _ in layers),
        {key: max(sizes) for key, sizes in found.items()},
    )
