"""Writer of tensors to one or several safetensors files, which :mod:`fastinfer.formats.safetensors_folder` reads."""

import json
from pathlib import Path

from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.safetensors_folder import INDEX, SINGLE
from fastinfer.utils.safetensors_file import write_tensors


class ShardWriter:
    """Collects tensors until they fill a file.

    Args:
        folder: folder to write to.
        shard_bytes: largest size of a file, except that a larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: dict[str, int] = {}
        self._count = 0  # number of files written so far

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor on the CPU, which must not change until its file is written.

        Raises:
            QuantizationError: there is a tensor of that name already.
        """
        if name in self:
            raise QuantizationError(f"tensor {name!r} is there already")
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._shards[name] = self._count
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the remaining tensors and, if there are several files, their index."""
        self._write()
        if self._count == 1:
            self._temporary(0).rename(self._folder / SINGLE)
            return
        names = [f"model-{index + 1:05}-of-{self._count:05}.safetensors" for index in range(self._count)]
        for number, name in enumerate(names):
            self._temporary(number).rename(self._folder / name)
        weight_map = {name: names[number] for name, number in sorted(self._shards.items())}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._temporary(self._count)
        write_tensors(self._pending, path, {"format": "pt"})  # transformers requires this entry
        self._count += 1
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, index: int) -> Path:
        """Return the name of a file until the number of files is known."""
        return self._folder / f"shard-{index}"
