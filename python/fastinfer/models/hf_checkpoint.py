"""Tensors of a Hugging Face folder (safetensors files and ``config.json``) by the project's names."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, FastinferError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.linear_tensors import DENSE_DTYPES
from fastinfer.formats.quantized_checkpoint import read_linear
from fastinfer.formats.safetensors_folder import SafetensorsFolder, weight_file_bytes
from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.models.checkpoint import fused_rows, split_name
from fastinfer.models.families import FAMILIES
from fastinfer.models.hf_config import read_hf_config

D2T = "d2t"


class HFCheckpoint:
    """An open Hugging Face folder.

    Args:
        path: path of the folder.
        exact: whether to keep all numbers of quantised weights unrounded, see
            :func:`fastinfer.formats.quantized_checkpoint.read_linear`.

    Raises:
        CheckpointFormatError: a file is missing or damaged.
        UnsupportedModelError: the architecture or one of its settings is not implemented.
    """

    def __init__(self, path: Path, exact: bool = False) -> None:
        self.path = path
        self.config = read_hf_config(path / "config.json")
        self._fields = JsonFields.read(path / "config.json", CheckpointFormatError)
        self._family = FAMILIES[self.config.architecture]
        self.tensors = SafetensorsFolder(path)
        prefix = self._family.prefix
        self._bare = not any(name.startswith(prefix) for name in self.tensors.names)
        self._exact = exact
        quantization = self._fields.object("quantization_config")
        self._quantization = None if quantization is None else quantization.values

    @property
    def weight_bytes(self) -> int:
        return weight_file_bytes(self.path)

    def __contains__(self, name: str) -> bool:
        return f"{self.stored_name(name)}.weight" in self.tensors

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        module = self.stored_name(name)
        is_layer = name.startswith("layers.")
        weight = self._linear(module) if is_layer else self._dense(module)
        rows = self._rows(name)
        if rows is not None and weight.shape[0] >= rows.stop:
            weight = weight.rows(rows)
        if weight.shape != (out_features, in_features):
            raise CheckpointFormatError(
                f"{self.path}: {module} must have the shape {[out_features, in_features]}, got {list(weight.shape)}"
            )
        return weight

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        yield self.linear(name, out_features, in_features)

    def vector(self, name: str, size: int) -> Tensor:
        is_bias, module = name.endswith(".bias"), name.removesuffix(".bias")
        stored = self.stored_name(module) + (".bias" if is_bias else ".weight")
        rows = self._rows(module) if is_bias else None
        values = self._get(stored).float()
        if rows is not None and len(values) >= rows.stop:
            values = values[rows]
        if values.shape != (size,):
            raise CheckpointFormatError(
                f"{self.path}: tensor {stored!r} must have the shape {[size]}, got {list(values.shape)}"
            )
        return values + self._family.norm_offset if name.endswith("norm") else values.clone()

    def draft_tokens(self) -> Tensor | None:
        # As SpecForge and EAGLE-3 store it: tensor d2t holds, for each row, the token minus the row.
        vocab_size = self.config.vocab_size
        rows = self.config.draft_vocab_size or vocab_size
        offsets = self.tensors.get(D2T)
        if offsets is None and rows == vocab_size:
            return None
        if offsets is None:
            raise CheckpointFormatError(f"{self.path}: tensor {D2T!r} is missing, which draft_vocab_size={rows} needs")
        if offsets.shape != (rows,) or offsets.dtype not in (torch.int64, torch.int32):
            raise CheckpointFormatError(
                f"{self.path}: tensor {D2T!r} must be [{rows}] int64, got {list(offsets.shape)} {offsets.dtype}"
            )
        tokens = offsets.long() + torch.arange(rows)
        outside = (tokens < 0) | (tokens >= vocab_size)
        if outside.any():
            row = int(outside.nonzero()[0])
            raise CheckpointFormatError(
                f"{self.path}: tensor {D2T!r} must give tokens in 0..{vocab_size - 1}, "
                f"got {int(tokens[row])} for row {row}"
            )
        known, counts = tokens.unique(return_counts=True)
        if len(known) < rows:
            raise CheckpointFormatError(
                f"{self.path}: tensor {D2T!r} must give each row another token, "
                f"got {int(known[counts.argmax()])} {int(counts.max())} times"
            )
        return tokens

    def layout(self, layer: int) -> frozenset[tuple[str, tuple[int, ...], str]]:
        prefix = self._without_prefix(f"{self._family.top['layers']}.{layer}.")
        names = [name for name in self.tensors.names if name.startswith(prefix)]
        return frozenset((name.removeprefix(prefix), *self.tensors.header(name)) for name in names)

    def release(self) -> None:
        self.tensors.release()

    @property
    def is_quantized(self) -> bool:
        """Whether config.json has a ``quantization_config``."""
        return self._quantization is not None

    @property
    def is_transposed(self) -> bool:
        """Whether matrices are stored as [in_features, out_features]."""
        return self._family.transposed

    @property
    def norm_offset(self) -> float:
        """Number that is added to the stored weights of RMSNorms."""
        return self._family.norm_offset

    def stored_name(self, name: str) -> str:
        """Return the name of a module in the checkpoint."""
        top = self._family.top
        if name.startswith("layers."):
            layer, part, rest = split_name(name)
            module = f"{top['layers']}.{layer}.{self._family.layer[part]}"
            if rest:
                expert, projection = rest.split(".")
                module += f".{expert}.{self._family.layer[projection]}"
        else:
            module = top.get(name, name)
        return self._without_prefix(module)

    def _dense(self, module: str) -> Dense:
        values = self._get(f"{module}.weight")
        if values.dim() != 2:
            raise CheckpointFormatError(
                f"{self.path}: tensor {module + '.weight'!r} must have two dimensions, "
                f"got the shape {list(values.shape)}"
            )
        return Dense(values)

    def _linear(self, module: str) -> Unpacked:
        try:
            weight = read_linear(self.tensors, module, self._quantization, exact=self._exact)
        except FastinferError as error:
            raise type(error)(f"{self.path}: {error}") from None
        if self._family.transposed and isinstance(weight, Dense):
            return Dense(weight.values.T.contiguous())
        return weight

    def _get(self, name: str) -> Tensor:
        values = self.tensors.get(name)
        if values is None:
            raise CheckpointFormatError(f"{self.path}: tensor {name!r} is missing")
        if values.dtype not in DENSE_DTYPES:
            raise CheckpointFormatError(f"{self.path}: tensor {name!r} must be of a float dtype, got {values.dtype}")
        return values

    def _rows(self, name: str) -> slice | None:
        """Return the rows of a matrix within a fused one; None if it is stored on its own."""
        if not name.startswith("layers."):
            return None
        _, part, _ = split_name(name)
        names = self._family.layer
        fused = list(names.values()).count(names[part]) > 1
        return fused_rows(self.config, part) if fused else None

    def _without_prefix(self, name: str) -> str:
        """Remove the family's prefix from a name if the checkpoint leaves it out."""
        return name.removeprefix(self._family.prefix) if self._bare else name
