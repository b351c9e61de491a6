"""Reader of a checkpoint's tensors from one or several safetensors files, as Hugging Face saves them.

Format: https://huggingface.co/docs/safetensors. Pickled weights are refused, because they can run any code.
"""

import math
import os
import re
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.utils.regular_file import check_regular
from fastinfer.utils.text import is_text, one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_NAME_BYTES = 255  # of file systems
PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}


class _Slice(Protocol):
    """Header of one tensor, as the library returns it."""

    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class _Shard(Protocol):
    """Open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


class SafetensorsFolder:
    """Tensors of a folder by name; data stays on disk until a tensor is read.

    Args:
        folder: folder of one or several safetensors files.

    Attributes:
        path: the folder.

    Raises:
        CheckpointFormatError: there is no safetensors file, a shard is missing or damaged, or the index names a tensor
            or file that does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._names: dict[str, str] = self._index()
        self._files: dict[str, _Shard] = {}
        self._sizes: dict[str, int] = {}  # of the files in bytes; the header says that there are no fewer
        self._keys: dict[str, frozenset[str]] = {}
        for shard in sorted(set(self._names.values())):
            self._open(shard)
        if not self._names:
            self._open(SINGLE)
            self._names = dict.fromkeys(sorted(self._keys[SINGLE]), SINGLE)
        for name, shard in self._names.items():
            if name not in self._keys[shard]:
                raise CheckpointFormatError(f"{folder / shard}: tensor {name!r} is missing, which {INDEX} says is here")

    @property
    def files(self) -> list[Path]:
        """The files that the tensors are read from; there may be others beside them."""
        return [self.path / shard for shard in sorted(self._files)]

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading its data.

        Raises:
            CheckpointFormatError: the dtype is not supported.
        """
        code = self._slice(name).get_dtype()
        if code not in _DTYPES:
            raise CheckpointFormatError(f"{self.path}: tensor {name!r} has the dtype {code}; known are {list(_DTYPES)}")
        return _DTYPES[code]

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape of a tensor and the format's name of its dtype, without reading its data."""
        found = self._slice(name)
        return tuple(found.get_shape()), found.get_dtype()

    def num_bytes(self, name: str) -> int:
        """Return the size of a tensor's data in bytes."""
        shape, code = self.header(name)
        bits = re.search(r"\d+", code)  # F8_E4M3, BF16, I64; a BOOL is a byte
        return math.prod(shape) * (8 if bits is None else int(bits[0])) // 8

    def get(self, name: str) -> Tensor | None:
        """Get a tensor, or None if there is no tensor of this name; its memory is that of the mapped file."""
        if name not in self._names:
            return None
        self.dtype(name)
        shard = self._names[name]
        self._check_size(shard)
        return self._files[shard].get_tensor(name)

    def release(self) -> None:
        """Free the memory of data that was read, except where a tensor still uses it."""
        for shard in list(self._files):
            del self._files[shard]
            self._open(shard)

    def _index(self) -> dict[str, str]:
        path = self.path / INDEX
        if (self.path / SINGLE).exists():
            return {}  # beside an index, too, as in transformers
        if not path.exists():
            raise CheckpointFormatError(f"{self.path}: expected {SINGLE} or {INDEX}, got {self._found()}")
        shards = JsonFields.read(path, CheckpointFormatError).get("weight_map", dict)
        for name, shard in shards.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not _is_shard_name(shard):
                raise CheckpointFormatError(
                    f"{path}: expected a .safetensors file beside it for {name!r}, got {shard!r:.80}"
                )
        if not shards:
            raise CheckpointFormatError(f"{path}: weight_map is empty")
        missing = sorted({shard for shard in shards.values() if not (self.path / shard).exists()})
        if missing:
            raise CheckpointFormatError(f"{self.path}: {len(missing)} shards are missing, the first is {missing[0]}")
        return shards

    def _found(self) -> str:
        pickled = sorted(path.name for pattern in PICKLED for path in self.path.glob(pattern))
        if pickled:
            return f"{pickled[0]}, a pickle, which can run any code: save the model as safetensors"
        return "neither"

    def _open(self, shard: str) -> None:
        path = self.path / shard
        try:
            check_regular(path)
            file: _Shard = safe_open(path, framework="pt")
            self._sizes[shard] = path.stat().st_size
        except OSError as error:
            raise CheckpointFormatError(f"{path}: {error.strerror or error}") from None
        except (MemoryError, RuntimeError) as error:  # of the library or torch, without room in the address space
            raise CheckpointFormatError(f"{path}: cannot be mapped into memory: {one_line(error)}") from None
        except SafetensorError as error:
            raise CheckpointFormatError(f"{path}: not a valid safetensors file: {error}") from None
        self._keys[shard] = frozenset(file.keys())
        self._files[shard] = file

    def _check_size(self, shard: str) -> None:
        """Refuse a file that was cut after it was opened: reading mapped memory behind its end ends the process."""
        size = os.stat(self.path / shard).st_size
        if size < self._sizes[shard]:
            raise CheckpointFormatError(
                f"{self.path / shard}: the file was cut from {self._sizes[shard]} to {size} bytes while it was read"
            )

    def _slice(self, name: str) -> _Slice:
        return self._files[self._names[name]].get_slice(name)


def _is_shard_name(name: str) -> bool:
    return name.endswith(".safetensors") and is_text(name) and len(name.encode()) <= MAX_NAME_BYTES
