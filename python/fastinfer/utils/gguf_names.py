"""Names of GGUF files: those of a model that is split into several, and those of image encoders."""

import re

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def shard_names(name: str) -> list[str]:
    """Return the names of all files of a model in their order: of ``a-00002-of-00003.gguf`` these are three.

    Args:
        name: name of one of them. If it does not have the form of a shard's name, the result is this name alone.
    """
    match = SHARD.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def is_mmproj(name: str) -> bool:
    """Return whether a file's name says that it has an image encoder, which converters call mmproj."""
    return "mmproj" in name.lower()
