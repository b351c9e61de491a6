"""A folder of safetensors files, as Hugging Face saves them, made of a GGUF file whose weights are not quantised.

Names, order of rows and fused matrices are those of the family's checkpoints, so that whatever reads such a folder
reads the model.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import FastinferError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFType
from fastinfer.formats.unpacked import Dense
from fastinfer.models.checkpoint import split_name, tiled_rows
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.families import FAMILIES
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import PARAMETERS
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.quantize.gguf_config_json import config_json
from fastinfer.quantize.shards import ShardWriter
from fastinfer.tokenizers.tokenizer import GGUF_TOKENIZER

# Types of matrices, with the dtypes in which they are written. Numbers in Q8_0 are products, which fp16 rounds.
DTYPES = {
    GGUFType.F32: torch.float32,
    GGUFType.F16: torch.float16,
    GGUFType.BF16: torch.bfloat16,
    GGUFType.Q8_0: torch.float16,
}


@contextmanager
def folder_of_gguf(file: GGUFFile, beside: Path, shard_bytes: int) -> Iterator[Path]:
    """Make a temporary folder with the model of a GGUF file.

    Args:
        file: the open file, with weights in F32, F16, BF16 or Q8_0.
        beside: path beside which the folder is made.
        shard_bytes: size of a file of tensors.

    Yields:
        The folder, which is removed at the end.

    Raises:
        UnsupportedModelError: the file has weights of another type, or its architecture is not known here.
        FastinferError: that of the caller, which names the file where it named the folder.
    """
    for name, stored in file.tensors.items():
        if stored.type not in DTYPES:
            raise UnsupportedModelError(
                f"{file.path}: the model is quantised already: tensor {name!r} must be of the type "
                f"{', '.join(kind.name for kind in DTYPES)}, got {stored.type.name}"
            )
    checkpoint = _RecordingCheckpoint(file)
    dtype = DTYPES[file.tensors["token_embd.weight"].type]
    values, config = config_json(checkpoint, str(dtype).removeprefix("torch."))
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as path:
        folder = Path(path)
        shards = ShardWriter(folder, shard_bytes)
        for tensors in _tensors(checkpoint, config):
            for tensor_name, tensor in tensors.items():
                shards.add(tensor_name, tensor)
        shards.close()
        (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        file.write_metadata(folder / GGUF_TOKENIZER)
        try:
            yield folder
        except FastinferError as error:  # of a folder that the user has not made and cannot look at any more
            pattern = rf"{re.escape(str(folder))}(/[\w.-]+)?"
            raise type(error)(re.sub(pattern, lambda _: str(file.path), str(error))) from None


class _RecordingCheckpoint(GGUFCheckpoint):
    """GGUF file that keeps what the loader has read of it.

    Attributes:
        read: matrices and vectors by name, since they were last taken.
    """

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file, exact=True)
        self.read: dict[str, Tensor] = {}

    def linear(self, name: str, out_features: int, in_features: int) -> Dense:
        weight = super().linear(name, out_features, in_features)
        values = weight.values if isinstance(weight, Dense) else weight.dequantize().to(DTYPES[GGUFType.Q8_0])
        self.read[name] = values
        return Dense(values)

    def vector(self, name: str, size: int) -> Tensor:
        self.read[name] = values = super().vector(name, size)
        return values

    def take(self) -> dict[str, Tensor]:
        """Return what was read, and forget it."""
        taken, self.read = self.read, {}
        return taken


def _tensors(checkpoint: _RecordingCheckpoint, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """Read all tensors, layer by layer, under the names in a folder of the model with this configuration."""
    loader = DecoderLoader(LayerReader(checkpoint, Precision.of("float32"), "cpu"), 1)
    for name in ("embedding", "lm_head"):
        if name in checkpoint:
            checkpoint.linear(name, config.vocab_size, config.hidden_size)
    if config.lm_head_bias:
        checkpoint.vector("lm_head.bias", config.vocab_size)
    loader.norm()
    checkpoint.read.pop("rope_factors", None)  # which config.json has
    yield _stored(checkpoint.take(), config)
    for index in range(config.num_layers):
        loader.layer(index)  # reads the tensors that such a layer has
        yield _stored(checkpoint.take(), config)
        checkpoint.release()


def _stored(read: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename tensors, and concatenate those that are one in such a folder, in the order in which they were read."""
    parts: dict[str, list[Tensor]] = {}
    names = FAMILIES[config.architecture].layer
    is_shared = names["mlp_norm"] == names["attention_norm"]
    for name, values in read.items():
        if ".mlp_norm" in name and is_shared:
            continue  # attention's
        parts.setdefault(_stored_name(name, config), []).append(_stored_values(name, values, config))
    return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}


def _stored_values(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Return a tensor as it is in such a folder."""
    part = name.rpartition(".")[2]
    if part.endswith("norm") and part != "gated_norm":
        return values - FAMILIES[config.architecture].norm_offset
    if part == "conv1d":
        return values[:, None]
    if part in ("xielu_beta", "xielu_eps"):
        return values[0]
    if part == "out_proj" and isinstance(config.states, LinearAttentionConfig):
        return values[:, tiled_rows(config.states, config.states.value_dim)]
    return values


def _stored_name(name: str, config: ModelConfig) -> str:
    family = FAMILIES[config.architecture]
    module, _, kind = name.rpartition(".") if name.endswith(".bias") else (name, "", "weight")
    if not module.startswith("layers."):
        return f"{family.top[module]}.{kind}"
    layer, part, rest = split_name(module)
    stored = f"{family.top['layers']}.{layer}.{family.layer[part]}"
    if rest:
        *expert, projection = rest.split(".")  # a shared expert has no number
        stored = ".".join([stored, *expert, family.expert[projection]])
    return stored if part in PARAMETERS else f"{stored}.{kind}"
