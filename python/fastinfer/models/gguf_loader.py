"""Builds a decoder from a GGUF file.

Rows are concatenated and reordered while they are still packed, so that Q, K and V become one weight, gate and up
another, and every weight is unpacked and repacked once.
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor
from fastinfer.formats.gguf_dequant import Dense, Int4, Int8, unpack, unpack_rows
from fastinfer.formats.weight import ConcatenatedWeight, Weight, make_weight
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.ops.pack import interleave_gate_up

ARCHITECTURES = ("llama",)

# Larger claims are not sizes of a model but damage; each stays far below what would overflow a product of two.
MAX_SIZE = 2**24
# Of the rotary table: 256 MiB at a head size of 64.
MAX_POSITIONS = 2**20


def read_config(file: GGUFFile) -> ModelConfig:
    """The decoder's sizes from the file's metadata.

    Raises:
        UnsupportedModelError: the architecture or its rotary scaling is not implemented.
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not implemented; supported are {', '.join(ARCHITECTURES)}"
        )

    def size(key: str, default: int | None = None) -> int:
        name = f"{architecture}.{key}"
        if default is None:
            return file.get(name, int, minimum=1, maximum=MAX_SIZE)
        return file.get(name, int, default, minimum=1, maximum=MAX_SIZE)

    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    head_dim = size("attention.key_length", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise GGUFFormatError(f"{file.path}: {num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    rotary_dim = size("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise GGUFFormatError(f"{file.path}: rotary size must be even and at most {head_dim}, got {rotary_dim}")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_layers=size("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=_tensor(file, "token_embd.weight").shape[0],
        max_position=size("context_length"),
        rms_norm_eps=file.get(f"{architecture}.attention.layer_norm_rms_epsilon", float, minimum=0.0, maximum=1.0),
        rope_theta=file.get(f"{architecture}.rope.freq_base", float, 10000.0, minimum=1.001),
        rope_scaling=_rope_scaling(file, architecture),
    )


def _rope_scaling(file: GGUFFile, architecture: str) -> ops.RopeScaling:
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rotary scaling {kind!r} is not implemented; supported are none, linear, yarn"
        )
    length = f"{prefix}.original_context_length"
    trained = file.get(length, int, minimum=1, maximum=MAX_SIZE) if kind == "yarn" else 0
    factor = file.get(f"{prefix}.factor", float, 1.0, minimum=1e-3)
    return ops.RopeScaling(kind=kind, factor=factor, original_max_position=trained)


def load_gguf(file: GGUFFile, precision: Precision, max_model_len: int | None, device: str = "cpu") -> Decoder:
    """Read, check and pack all weights.

    Args:
        file: an open file.
        precision: how the model computes.
        max_model_len: positions in the rotary table, ``None`` for the model's own limit.
        device: where the weights will be.

    Raises:
        UnsupportedModelError: the architecture, or a tensor's type, is not implemented.
        GGUFFormatError: a tensor is missing or has another shape than the metadata say.
    """
    config = read_config(file)
    positions = min(max_model_len or config.max_position, config.max_position)
    if positions > MAX_POSITIONS:
        raise RequestError(f"max_model_len must be at most {MAX_POSITIONS}, got {positions} from {file.path}")
    loader = _Loader(file, precision, device)
    embedding = loader.vocabulary("token_embd.weight", config)
    lm_head = loader.vocabulary("output.weight", config) if "output.weight" in file.tensors else embedding
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index, config))
        file.release()  # else the file and its packed copy would be in memory at once
    return Decoder(
        config=config,
        dtype=precision.dtype,
        embedding=embedding,
        layers=tuple(layers),
        norm=loader.vector("output_norm.weight", config.hidden_size),
        lm_head=lm_head,
        cos_sin_cache=ops.cos_sin_cache(
            config.rotary_dim,
            positions,
            config.rope_theta,
            config.rope_scaling,
            loader.frequency_factors(config),
        ).to(device),
    )


class _Loader:
    """Turns the tensors of one file into weights."""

    def __init__(self, file: GGUFFile, precision: Precision, device: str) -> None:
        self._file = file
        self._precision = precision
        self._device = device

    def layer(self, index: int, config: ModelConfig) -> DecoderLayer:
        def name(part: str) -> str:
            return f"blk.{index}.{part}.weight"

        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        q = self._rows(name("attn_q"), q_size, hidden)
        k = self._rows(name("attn_k"), kv_size, hidden)
        v = self._rows(name("attn_v"), kv_size, hidden)
        gate = self._rows(name("ffn_gate"), config.intermediate_size, hidden)
        up = self._rows(name("ffn_up"), config.intermediate_size, hidden)
        if gate.type is not up.type or config.intermediate_size % ops.pack.TILE_ROWS:
            raise UnsupportedModelError(
                f"{self._file.path}: layer {index}: gate and up must have one type and a multiple of "
                f"{ops.pack.TILE_ROWS} rows, got {gate.type.name} and {up.type.name} with {config.intermediate_size}"
            )
        gate_up = interleave_gate_up(torch.from_numpy(gate.data), torch.from_numpy(up.data)).numpy()
        return DecoderLayer(
            attention_norm=self.vector(name("attn_norm"), hidden),
            qkv=self._concatenate(
                (q, _unpermute(q.data, config.num_heads, config.rotary_dim)),
                (k, _unpermute(k.data, config.num_kv_heads, config.rotary_dim)),
                (v, v.data),
            ),
            output=self.matrix(name("attn_output"), hidden, q_size),
            mlp_norm=self.vector(name("ffn_norm"), hidden),
            gate_up=self._weight(gate, gate_up),
            down=self.matrix(name("ffn_down"), hidden, config.intermediate_size),
        )

    def matrix(self, name: str, rows: int, columns: int) -> Weight:
        tensor = self._rows(name, rows, columns)
        return self._weight(tensor, tensor.data)

    def vocabulary(self, name: str, config: ModelConfig) -> Weight:
        """The embedding or the last product; often one and the same."""
        tensor = self._rows(name, config.vocab_size, config.hidden_size)
        return self._make(unpack(tensor), self._precision.logits_activation_bits)

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight, fp32."""
        tensor = _tensor(self._file, name, (size,))
        unpacked = unpack(tensor)
        if not isinstance(unpacked, Dense):
            raise UnsupportedModelError(f"{self._file.path}: tensor {name!r} must be dense, got {tensor.type.name}")
        return unpacked.values.float().to(self._device)

    def frequency_factors(self, config: ModelConfig) -> Tensor | None:
        """Divisors of the rotary frequencies: how converters write down Llama 3's scaling."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        return self.vector("rope_freqs.weight", config.rotary_dim // 2).cpu()

    def _rows(self, name: str, rows: int, columns: int) -> GGUFTensor:
        return _tensor(self._file, name, (rows, columns))

    def _concatenate(self, *parts: tuple[GGUFTensor, np.ndarray]) -> Weight:
        tensors = [tensor for tensor, _ in parts]
        if len({tensor.type for tensor in tensors}) == 1:
            return self._weight(tensors[0], np.concatenate([data for _, data in parts]))
        return ConcatenatedWeight(tuple(self._weight(tensor, data) for tensor, data in parts))

    def _weight(self, tensor: GGUFTensor, data: np.ndarray) -> Weight:
        return self._make(unpack_rows(data, tensor.type, tensor.name), self._precision.activation_bits)

    def _make(self, unpacked: Dense | Int4 | Int8, activation_bits: int) -> Weight:
        """On a GPU a dense weight has the dtype of the hidden states, which products want there."""
        dense_dtype = None if self._device == "cpu" else self._precision.dtype
        return make_weight(unpacked, activation_bits, self._device, dense_dtype)


def _tensor(file: GGUFFile, name: str, shape: tuple[int, ...] | None = None) -> GGUFTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise GGUFFormatError(f"{file.path}: tensor {name!r} is missing")
    if shape is not None and tensor.shape != shape:
        raise GGUFFormatError(f"{file.path}: tensor {name!r} must have the shape {shape}, got {tensor.shape}")
    return tensor


def _unpermute(rows: np.ndarray, num_heads: int, rotary_dim: int) -> np.ndarray:
    """Undo the converter's reordering of Q and K rows, which makes rotated pairs neighbours: back to halves.

    Args:
        rows: [num_heads * head_dim, row_bytes].
    """
    heads = rows.reshape(num_heads, -1, rows.shape[-1])
    pairs = heads[:, :rotary_dim].reshape(num_heads, rotary_dim // 2, 2, -1)
    halves = pairs.swapaxes(1, 2).reshape(num_heads, rotary_dim, -1)
    return np.concatenate([halves, heads[:, rotary_dim:]], axis=1).reshape(rows.shape)
