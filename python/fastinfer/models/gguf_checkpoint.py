"""Tensors of a GGUF file by the project's names; quantised rows stay in the file until they are packed."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.gguf_unpack import read_rows, unpack_rows
from fastinfer.formats.unpacked import Dense, Lut, Unpacked
from fastinfer.models.checkpoint import fused_rows, split_name
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.ops.pack import TILE_ROWS

PART_ELEMENTS = 2**20  # size of a part, small enough for its unpacked copy to reuse the memory of the previous one

_TOP = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "position_embedding": "position_embd",
    "rope_factors": "rope_freqs",
}
_LAYER = {
    "attention_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
# Matrices that some families store as one fused matrix.
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_qkv") | dict.fromkeys(("gate_proj", "up_proj"), "ffn_up")


class GGUFCheckpoint:
    """An open GGUF file.

    Args:
        file: the open file.
        exact: whether to unpack all types without rounding, which takes more memory; see
            :func:`fastinfer.formats.gguf_unpack.unpack_rows`.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        GGUFFormatError: the metadata are wrong.
    """

    def __init__(self, file: GGUFFile, exact: bool = False) -> None:
        self.file = file
        self._exact = exact
        self.path: Path = file.path
        self.config = read_gguf_config(file)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.file.tensors.values())

    def __contains__(self, name: str) -> bool:
        return f"{self._stored(name)}.weight" in self.file.tensors

    def linear(self, name: str, out_features: int, in_features: int) -> Dense | GGUFRows:
        tensor, rows = self._rows(name, out_features, in_features)
        weight = read_rows(tensor.data[rows], tensor.type, tensor.name, exact=self._exact)
        if self.config.architecture != "llama" or not name.endswith((".q_proj", ".k_proj")):
            return weight
        heads = self.config.num_heads if name.endswith(".q_proj") else self.config.num_kv_heads
        return weight.rows(_unpermuted_rows(heads, out_features // heads, self.config.rotary_dim))

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        weight = self.linear(name, out_features, in_features)
        if isinstance(weight, Dense):
            yield weight
            return
        rows = -(-PART_ELEMENTS // in_features // TILE_ROWS) * TILE_ROWS
        for begin in range(0, out_features, rows):
            part = weight.rows(slice(begin, begin + rows))
            # No operator looks up single rows of a look-up table's indices.
            yield part.unpack_integers() if name == "embedding" and isinstance(part.form, Lut) else part
            self.release()

    def vector(self, name: str, size: int) -> Tensor:
        is_bias = name.endswith(".bias")
        stored = self._stored(name.removesuffix(".bias")) + (".bias" if is_bias else ".weight")
        tensor = self._get(stored)
        unpacked = unpack_rows(tensor.data.reshape(1, -1), tensor.type, stored)
        if not isinstance(unpacked, Dense):
            raise UnsupportedModelError(f"{self.path}: tensor {stored!r} must be dense, got {tensor.type.name}")
        values = unpacked.values.float().view(-1)
        rows = self._fused_rows(name.removesuffix(".bias")) if is_bias else None
        if rows is not None and len(values) >= rows.stop:
            values = values[rows]
        if len(tensor.shape) != 1 or len(values) != size:
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must have the shape {(size,)}, got {tensor.shape}")
        return values.clone()

    def draft_tokens(self) -> Tensor | None:
        return None

    def layout(self, layer: int) -> frozenset[tuple[str, tuple[int, ...], GGUFType]]:
        prefix = f"blk.{layer}."
        tensors = self.file.tensors.items()
        return frozenset((name.removeprefix(prefix), t.shape, t.type) for name, t in tensors if name.startswith(prefix))

    def release(self) -> None:
        self.file.release()

    def _rows(self, name: str, out_features: int, in_features: int) -> tuple[GGUFTensor, slice]:
        """Return the tensor that contains a matrix, and which of its rows are the matrix."""
        stored = f"{self._stored(name)}.weight"
        tensor = self._get(stored)
        rows = slice(None)
        shape: tuple[int, ...] = (out_features, in_features)
        if fused := self._fused_rows(name):
            rows = fused
            whole = fused_rows(self.config, "v_proj" if stored.endswith("attn_qkv.weight") else "up_proj").stop
            shape = (whole, in_features)
        elif ".experts." in name:
            expert = int(split_name(name)[2].partition(".")[0])
            rows = slice(expert * out_features, (expert + 1) * out_features)
            shape = (self.config.num_experts, out_features, in_features)
        if tensor.shape != shape:
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must have the shape {shape}, got {tensor.shape}")
        return tensor, rows

    def _stored(self, name: str) -> str:
        """Return the name of a matrix or vector in the file, without ``.weight`` or ``.bias``."""
        if not name.startswith("layers."):
            return _TOP[name]
        layer, part, rest = split_name(name)
        if part == "experts":
            return f"blk.{layer}.{_EXPERTS[rest.partition('.')[2]]}"
        return f"blk.{layer}.{_FUSED[part] if self._fused_rows(name) else _LAYER[part]}"

    def _fused_rows(self, name: str) -> slice | None:
        """Return the rows of a matrix within a fused one; None if it is stored on its own."""
        if not name.startswith("layers."):
            return None
        layer, part, _ = split_name(name)
        single = f"blk.{layer}.{'ffn_gate' if part == 'up_proj' else _LAYER.get(part)}.weight"
        # Without a separate gate, "up" contains both, unless the MLP has no gate.
        if part not in _FUSED or single in self.file.tensors or (part == "up_proj" and not self.config.gated):
            return None
        fused = f"blk.{layer}.{_FUSED[part]}.weight"
        return fused_rows(self.config, part) if fused in self.file.tensors else None

    def _get(self, name: str) -> GGUFTensor:
        self.file.check_size()
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise GGUFFormatError(f"{self.path}: tensor {name!r} is missing")
        return tensor


def _unpermuted_rows(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Undo the converter's reordering of Q and K rows: it interleaves rotated pairs, and the kernels expect halves.

    Returns:
        [num_heads * head_dim] int64, the file's row for each row.
    """
    heads = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    pairs = heads[:, :rotary_dim].unflatten(1, (rotary_dim // 2, 2))
    return torch.cat([pairs.transpose(1, 2).flatten(1), heads[:, rotary_dim:]], dim=1).flatten()
