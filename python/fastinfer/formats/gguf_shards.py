"""GGUF models that are split into several files, named ``NAME-00001-of-00003.gguf`` and so on.

The first file has all metadata; each has a part of the tensors. Source: ``gguf-split`` of llama.cpp, which writes them,
https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.
"""

import os

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.utils.gguf_names import shard_names

MAX_SHARDS = 99999  # five digits in the name


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, and all further files of its model if it is the first of several.

    Args:
        path: path of the file.

    Raises:
        ModelNotFoundError: a file cannot be opened.
        GGUFFormatError: a file is malformed, is not the one that its name says, or is not the first.
    """
    first = GGUFFile(path)
    count = first.get("split.count", int, 1, minimum=0, maximum=MAX_SHARDS)
    if count <= 1:
        return first
    names = shard_names(first.path.name)
    number = first.get("split.no", int, minimum=0, maximum=count - 1)
    if len(names) != count or first.path.name != names[number]:
        raise GGUFFormatError(
            f"{first.path}: expected a name that ends in -{number + 1:05}-of-{count:05}.gguf, because the file is "
            f"number {number + 1} of {count} of its model"
        )
    if number != 0:
        raise GGUFFormatError(f"{first.path}: expected the first of the {count} files of this model, {names[0]}")
    for index, name in enumerate(names[1:], start=1):
        other = GGUFFile(first.path.with_name(name))
        place = tuple(other.get(key, int, minimum=0) for key in ("split.no", "split.count"))
        if place != (index, count):
            raise GGUFFormatError(
                f"{other.path}: expected split.no {index} and split.count {count}, got {place[0]} and {place[1]}"
            )
        first.join(other)
    expected = first.get("split.tensors.count", int, len(first.tensors))
    if len(first.tensors) != expected:
        raise GGUFFormatError(f"{first.path}: expected {expected} tensors in {count} files, got {len(first.tensors)}")
    return first
