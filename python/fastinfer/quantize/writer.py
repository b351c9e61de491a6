"""Writer of quantised checkpoints that transformers and vLLM read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, QuantizationError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.linear_tensors import DENSE_DTYPES
from fastinfer.formats.safetensors_folder import SafetensorsFolder
from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.quantize.bitsandbytes_layout import BitsAndBytesLayout
from fastinfer.quantize.compressed_tensors_layout import CompressedTensorsLayout
from fastinfer.quantize.gptq_layout import GPTQLayout
from fastinfer.quantize.layout import Layout, WriterSettings
from fastinfer.quantize.shards import ShardWriter
from fastinfer.utils.checks import check_new_folder

FORMATS = ("gptq", "compressed-tensors", "bitsandbytes")
SHARD_BYTES = 2 * 10**9

# Files of the tokenizer and of generation. The suffixes exclude files that are executed or unpickled.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab*",
    "merges*",
    "*.model",
    "*processor_config.json",
)
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".gguf")


class CheckpointWriter:
    """Context manager that writes a folder with a quantised checkpoint.

    The files go to a temporary folder beside ``out``, which :meth:`close` renames, so that ``out`` is either complete
    or missing. If ``out`` is there, the files are moved into it, config.json last. Leaving the context without
    :meth:`close` removes the temporary folder.

    Args:
        out: folder to write, new or empty.
        source: folder of the original model, with safetensors files and config.json.
        fmt: one of ``FORMATS``.
        settings: quantisation of all weights.
        shard_bytes: size of a file of tensors, which stay in memory until it is full.

    Raises:
        RequestError: the folder is not empty.
        QuantizationError: the format is unknown, or it cannot hold such weights.
        CheckpointFormatError: the source is not a valid checkpoint.
    """

    def __init__(
        self, out: Path, source: Path, fmt: str, settings: WriterSettings, shard_bytes: int = SHARD_BYTES
    ) -> None:
        check_new_folder("out", out)
        self._source = SafetensorsFolder(source)
        self._config = JsonFields.read(source / "config.json", CheckpointFormatError).values
        self._layout = _layout(fmt, settings, self._dtype())
        self._left_out = ["lm_head"]
        self._replaced: set[str] = set()
        self._modules: set[str] = set()
        self._out = out.resolve()
        self._folder = self._out.with_name(f".{self._out.name}.{os.getpid()}")
        self._discard()  # the folder of a killed process that had the same id
        self._folder.mkdir(parents=True)
        self._shards = ShardWriter(self._folder, shard_bytes)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def add_linear(self, module: str, weight: Unpacked, bias: Tensor | None = None) -> None:
        """Add a linear layer.

        Args:
            module: name of the layer in the source, such as ``model.layers.3.self_attn.q_proj``.
            weight: weight that is quantised as the settings say, or Dense for a layer that is not quantised, which gptq
                does not support.
            bias: [out_features], stored in the source's dtype.

        Raises:
            QuantizationError: the format cannot hold the weight, or the layer was added before.
        """
        if isinstance(weight, Dense) and self._layout.leaves_out:
            self._left_out.append(module)
            self.add(f"{module}.weight", weight.values)
        else:
            try:
                tensors = self._layout.tensors(weight)
            except QuantizationError as error:
                raise QuantizationError(f"layer '{module}': {error}") from None
            self._modules.add(module)
            for part, tensor in tensors.items():
                self._shards.add(f"{module}.{part}", tensor)
        if bias is not None:
            self.add(f"{module}.bias", bias)

    def leave_dense(self, module: str) -> None:
        """Name a linear layer of the source that is not quantised, and whose tensors :meth:`close` copies."""
        self._left_out.append(module)

    def replace(self, name: str) -> None:
        """Name a tensor of the source in whose place there are modules, and which :meth:`close` does not copy."""
        self._replaced.add(name)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add any other tensor, such as a norm or the embedding, stored in the dtype of the source's tensor.

        Raises:
            QuantizationError: that dtype cannot hold the tensor, or the tensor was added before.
        """
        dtype = self._source.dtype(name) if name in self._source else tensor.dtype
        stored = tensor.to(dtype)
        if dtype != tensor.dtype and not bool(stored.isfinite().all()):
            raise QuantizationError(f"tensor {name!r} has numbers that {str(dtype).removeprefix('torch.')} cannot hold")
        self._shards.add(name, stored)

    def close(self, rest: SafetensorsFolder | None = None) -> None:
        """Finish the folder and move it to ``out``.

        Args:
            rest: checkpoint from which all tensors are copied that have not been added or quantised.
        """
        if rest is not None:
            self._add_rest(rest)
        self._shards.close()
        # auto_map names Python files of the source, which are not copied.
        config = {key: value for key, value in self._config.items() if key != "auto_map"}
        config["quantization_config"] = self._layout.config(self._left_out)
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in sorted({path for pattern in COPIED for path in self._source.path.glob(pattern)}):
            if path.is_file() and path.suffix in COPIED_SUFFIXES:
                copy = self._folder / path.relative_to(self._source.path)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        if not self._out.exists():
            self._folder.rename(self._out)
            return
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == "config.json"):
            shutil.move(path, self._out)  # which may be another file system

    def _discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add_rest(self, rest: SafetensorsFolder) -> None:
        for name in rest.names:
            is_replaced = name in self._replaced or name.removesuffix(".weight") in self._modules
            if name not in self._shards and not is_replaced:
                tensor = rest.get(name)
                assert tensor is not None
                self.add(name, tensor)
                # A linear layer outside the decoder's layers: other programs take every one that is not named for
                # quantised. They look for no such layer where the matrix is an embedding.
                module, dot, kind = name.rpartition(".")
                if dot and kind == "weight" and tensor.dim() == 2 and module not in self._left_out:
                    self._left_out.append(module)

    def _dtype(self) -> torch.dtype:
        """Return the dtype in which the source's model computes."""
        name: Any = self._config.get("dtype") or self._config.get("torch_dtype")
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in DENSE_DTYPES}
        return by_name[name] if name in by_name else self._source.dtype(self._source.names[0])


def _layout(fmt: str, settings: WriterSettings, dtype: torch.dtype) -> Layout:
    if fmt == "gptq":
        return GPTQLayout(settings)
    if fmt == "compressed-tensors":
        return CompressedTensorsLayout(settings)
    if fmt == "bitsandbytes":
        return BitsAndBytesLayout(settings, dtype)
    raise QuantizationError(f"format: expected one of {', '.join(FORMATS)}, got {fmt!r}")
