"""``fastinfer models``: list the registered models and the paths of those that are downloaded, or what is supported."""

import argparse
import textwrap

from fastinfer import hub


def run(args: argparse.Namespace) -> int:
    """Print name, description, size and path of each model."""
    if args.supported:
        for name, values in supported().items():
            lines = textwrap.wrap(", ".join(values), 100, break_on_hyphens=False)
            print("\n    ".join([name, *lines]))
        return 0
    for entry in hub.models():
        default = " (default)" if entry.name == hub.DEFAULT_MODEL else ""
        print(f"{entry.name}{default}\n    {entry.description}, {entry.size / 1e6:.0f} MB")
        print(f"    {entry.path or f'not here yet: fastinfer pull {entry.name}'}")
    return 0


def supported() -> dict[str, list[str]]:
    """Return the names of what can be loaded, by kind, from the tables that the loaders use."""
    # These import torch.
    from fastinfer.formats.auto_round import AWQ, GPTQ_VERSIONS
    from fastinfer.formats.compressed_tensors import STRATEGIES
    from fastinfer.formats.gguf_unpack import SUPPORTED_TYPES
    from fastinfer.formats.modelopt import ALGORITHMS
    from fastinfer.formats.quantized_checkpoint import FORMATS
    from fastinfer.models.families import FAMILIES, RENAMED
    from fastinfer.models.gguf_architectures import ARCHITECTURES
    from fastinfer.models.hf_checkpoint import MLX_FAMILIES
    from fastinfer.models.hf_text_parts import TEXT_PARTS
    from fastinfer.models.image_encoder import FAMILIES as IMAGE_FAMILIES
    from fastinfer.models.mmproj import ARCHITECTURES as IMAGE_ARCHITECTURES
    from fastinfer.models.mmproj import PROJECTORS
    from fastinfer.tokenizers.gguf_tokenizer import READERS
    from fastinfer.tokenizers.pre_tokenizers import PRE_TOKENIZERS

    return {
        "Hugging Face architectures": [*FAMILIES, *RENAMED, *TEXT_PARTS],
        "Hugging Face architectures with images": [name for name in (*FAMILIES, *TEXT_PARTS) if name in IMAGE_FAMILIES],
        "GGUF architectures": list(ARCHITECTURES),
        "GGUF architectures with images": list(IMAGE_ARCHITECTURES),
        "GGUF image encoders": list(PROJECTORS),
        "GGUF types": [type.name for type in SUPPORTED_TYPES],
        "GGUF tokenizers": list(READERS),
        "GGUF pre-tokenizers": list(PRE_TOKENIZERS),
        "Hugging Face quantisation methods": list(FORMATS),
        "compressed-tensors formats": list(STRATEGIES),
        "AutoRound packings": [*GPTQ_VERSIONS, *AWQ],
        "Model Optimizer algorithms": [name.upper() for name in ALGORITHMS],
        "architectures as MLX stores them": sorted(MLX_FAMILIES),
    }
