"""Writing of safetensors files."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.utils.file_mode import share_as_new
from fastinfer.utils.text import one_line


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file that others may read as any new file. If that fails, there is none.

    Args:
        tensors: contiguous tensors that share no memory.
        path: path of the file.
        metadata: further entries of the file's header.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata)
        share_as_new(path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise RequestError(f"{path}: the file cannot be written: {one_line(error)}") from None
