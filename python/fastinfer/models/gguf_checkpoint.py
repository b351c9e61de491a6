"""Tensors of a GGUF file by the project's names; quantised rows stay in the file until they are packed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.gguf_unpack import packed_bytes, read_rows, unpack_rows
from fastinfer.formats.unpacked import Dense, Int8, Lut, Unpacked
from fastinfer.models.checkpoint import (
    LOOKED_UP,
    XIELU_PARAMETERS,
    ModelPart,
    decoder_layers,
    expert_index,
    fused_rows,
    rows_by_key_head,
    split_name,
    stored_layer,
    tiled_rows,
)
from fastinfer.models.gguf_architectures import ARCHITECTURES
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.gguf_fields import xielu_parameter
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.ops.pack import TILE_ROWS

E4M3_MAX = 448  # scales are multiplied by a factor
PART_ELEMENTS = 2**20  # size of a part, small enough for its unpacked copy to reuse the memory of the previous one

_TOP = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "position_embedding": "position_embd",
    "rope_factors": "rope_freqs",
    "per_layer_embedding": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_norm": "per_layer_proj_norm",
}
_LAYER = {
    "attention_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "sinks": "attn_sinks",
    "post_attention_norm": "post_attention_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
    "q_a_proj": "attn_q_a",
    "q_a_norm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
    "k_b_proj": "attn_k_b",
    "v_b_proj": "attn_v_b",
    "router": "ffn_gate_inp",
    "router_bias": "exp_probs_b",
    "router_scale": "ffn_gate_inp",
    "expert_scale": "ffn_down_exps",
    "experts_norm": "pre_ffw_norm_2",
    "post_dense_norm": "post_ffw_norm_1",
    "post_experts_norm": "post_ffw_norm_2",
    "layer_scale": "layer_output_scale",
    "per_layer_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_norm": "post_norm",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "experts_input": "ffn_latent_down",
    "experts_output": "ffn_latent_up",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha",
    "in_proj_b": "ssm_beta",
    "conv1d": "ssm_conv1d",
    "in_proj": "ssm_in",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt",
    "gated_norm": "ssm_norm",
    "out_proj": "ssm_out",
}
# Ends of the names of vectors, where they are not ".weight".
_SUFFIXES = {
    "router_bias": ".bias",
    "dt_bias": ".bias",
    "A_log": "",
    "D": "",
    "router_scale": ".scale",
    "expert_scale": ".scale",
}
# Matrices of linear attention whose rows are ordered by key head.
_BY_KEY_HEAD = {"in_proj_qkv": "ssm_in", "in_proj_z": "ssm_in", "in_proj_a": "ssm_ba", "in_proj_b": "ssm_ba"}
# Suffixes of the names of matrices of experts.
_EXPERTS = {"experts": "exps", "shared_expert": "shexp"}
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
        self._read: set[str] = set()

    @property
    def files(self) -> list[Path]:
        return self.file.files

    def weight_bytes(self, device: str) -> int:
        return self.part_bytes(device).total()

    def part_bytes(self, device: str) -> Counter[ModelPart]:
        embedding = f"{_TOP['embedding']}.weight"
        layers = decoder_layers(self.config)
        sizes: Counter[ModelPart] = Counter()
        for name in self._loaded_names():
            kind, _, rest = name.partition(".")
            layer = layers[int(rest.partition(".")[0])] if kind == "blk" else None
            part = ModelPart(layer, f"_{_EXPERTS['experts']}." in rest)
            tensor = self.file.tensors[name]
            sizes[part] += packed_bytes(tensor, self._exact, device, is_embedding=name == embedding)
        return sizes

    def __contains__(self, name: str) -> bool:
        return f"{self._stored(name)}.weight" in self.file.tensors

    def linear(self, name: str, out_features: int, in_features: int) -> Dense | Int8 | GGUFRows:
        if (parts := ARCHITECTURES[self.config.architecture].conv_parts) and name.endswith(".conv1d"):
            return self._filters(name, parts, in_features)
        tensor, rows = self._rows(name, out_features, in_features)
        factor = self._factor(name, tensor)
        weight = read_rows(tensor.data[rows], tensor.type, tensor.name, exact=self._exact, factor=factor)
        order = self._order(name, out_features)
        return weight if order is None else weight.rows(order)

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        weight = self.linear(name, out_features, in_features)
        if isinstance(weight, Dense):
            yield weight
            return
        rows = -(-PART_ELEMENTS // in_features // TILE_ROWS) * TILE_ROWS
        for begin in range(0, out_features, rows):
            part = weight.rows(slice(begin, begin + rows))
            if name in LOOKED_UP and isinstance(part, GGUFRows) and isinstance(part.form, Lut):
                yield part.unpack_integers()
            else:
                yield part
            self.release()

    def vector(self, name: str, size: int) -> Tensor:
        is_bias, matrix = name.endswith(".bias"), name.removesuffix(".bias")
        part = name.rpartition(".")[2]
        if part in XIELU_PARAMETERS:  # which are metadata
            return torch.tensor([xielu_parameter(self.file, part, split_name(name)[0], self.config.num_layers)])
        suffixes = {**_SUFFIXES, **ARCHITECTURES[self.config.architecture].suffixes}
        stored = self._stored(matrix) + (".bias" if is_bias else suffixes.get(part, ".weight"))
        tensor = self._get(stored)
        data, shape = tensor.data.reshape(1, -1), tensor.shape
        expert = expert_index(name)
        if expert is not None and len(shape) == 2 and shape[0] == self.config.num_experts:
            data, shape = tensor.data[expert : expert + 1], shape[1:]
        unpacked = unpack_rows(data, tensor.type, stored)
        if not isinstance(unpacked, Dense):
            raise UnsupportedModelError(f"{self.path}: tensor {stored!r} must be dense, got {tensor.type.name}")
        values = unpacked.values.float().view(-1)
        rows = self._fused_rows(matrix) if is_bias else None
        if rows is not None and len(values) >= rows.stop:
            values = values[rows]
        # The vectors of Mamba-2 are stored as columns or with a row for each group, ERNIE's router biases as a row.
        is_vector = len(shape) == 1 or part in ("A_log", "D", "gated_norm", "router_bias")
        if not is_vector or len(values) != size:
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must have the shape {(size,)}, got {tensor.shape}")
        # The converter has changed their order like that of rows.
        if (is_bias or part in ("A_log", "dt_bias")) and (order := self._order(matrix, size)) is not None:
            values = values[order]
        if part == "A_log":  # stored as -exp(A_log), without the sign where decays have a bound
            is_bounded = isinstance(self.config.states, LinearAttentionConfig) and self.config.states.decay_bound
            rates, sign = (values, "positive") if is_bounded else (-values, "negative")
            if not (rates > 0).all():
                worst = float(values[rates.argmin()])
                raise GGUFFormatError(f"{self.path}: tensor {stored!r} must be {sign}, got {worst}")
            return rates.log()
        return values.clone()

    def draft_tokens(self) -> Tensor | None:
        return None

    def layout(self, layer: int) -> frozenset[tuple[str, tuple[int, ...], GGUFType]]:
        stored = self.config.stored_layers[layer] if self.config.stored_layers else (layer,)
        return frozenset(
            (f"{place}.{name.removeprefix(prefix)}", tensor.shape, tensor.type)
            for place, prefix in enumerate(f"blk.{number}." for number in stored)
            for name, tensor in self.file.tensors.items()
            if name.startswith(prefix)
        )

    def unread(self) -> list[str]:
        return [
            name
            for name in self._loaded_names()
            if name.startswith("blk.") and name not in self._read and not self._is_spare(name)
        ]

    def release(self) -> None:
        self.file.release()

    def _is_spare(self, name: str) -> bool:
        """Return whether a layer does without a tensor that files may have."""
        _, number, part = name.split(".", 2)
        if part == "attn_kv_b.weight":  # also stored in two parts
            return f"blk.{number}.attn_k_b.weight" in self._read
        layer = decoder_layers(self.config)[int(number)]
        return self.config.kv_layer(layer) != layer and part.startswith(("attn_k.", "attn_v.", "attn_k_norm."))

    def _loaded_names(self) -> Iterator[str]:
        """Return the names of the tensors that are loaded."""
        # The last layers may predict tokens after the next one.
        layers = {str(layer) for layer in decoder_layers(self.config)}
        names = ((name, name.split(".")) for name in self.file.tensors)
        return (name for name, parts in names if parts[0] != "blk" or parts[1] in layers)

    def _rows(self, name: str, out_features: int, in_features: int) -> tuple[GGUFTensor, slice]:
        """Return the tensor that contains a matrix, and which of its rows are the matrix."""
        stored = f"{self._stored(name)}.weight"
        tensor = self._get(stored)
        rows = slice(None)
        shape: tuple[int, ...] = (out_features, in_features)
        if self._is_by_key_head(name):
            assert isinstance(self.config.states, LinearAttentionConfig)
            part = split_name(name)[1]
            same = [other for other, fused in _BY_KEY_HEAD.items() if fused == _BY_KEY_HEAD[part]]
            whole = sum(len(rows_by_key_head(self.config.states, other)) for other in same)
            shape = (whole, in_features)
        elif fused := self._fused_rows(name):
            rows = fused
            last = "v_proj" if stored.endswith("attn_qkv.weight") else "up_proj"
            shape = (self._rows_within(name, last).stop, in_features)
        elif (expert := expert_index(name)) is not None:
            halves = 2 if stored.endswith("gate_up_exps.weight") else 1
            first = halves * expert + (halves == 2 and name.endswith("up_proj"))
            rows = slice(first * out_features, (first + 1) * out_features)
            shape = (self.config.num_experts, halves * out_features, in_features)
        elif name.endswith((".k_b_proj", ".v_b_proj")):  # a matrix of each head
            shape = (self.config.num_heads, out_features // self.config.num_heads, in_features)
        is_vector = len(tensor.shape) == 1 and out_features == 1
        if tensor.shape != (shape[1:] if is_vector else shape):
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must have the shape {shape}, got {tensor.shape}")
        return tensor, rows

    def _filters(self, name: str, parts: tuple[str, ...], kernel_size: int) -> Dense:
        """Read the filters of queries, keys and values, whose tensors may have further dimensions of one element."""
        assert isinstance(self.config.states, LinearAttentionConfig)
        filters = []
        for part, size in zip(parts, self.config.states.qkv_sizes.values(), strict=True):
            tensor = self._get(f"blk.{stored_layer(self.config, *split_name(name)[:2])}.{part}.weight")
            if tensor.data.shape[0] != size or tensor.shape[-1] != kernel_size:
                raise GGUFFormatError(
                    f"{self.path}: tensor {tensor.name!r} must have the shape {(size, 1, kernel_size)}, "
                    f"got {tensor.shape}"
                )
            filters.append(unpack_rows(tensor.data, tensor.type, tensor.name).dequantize())
        return Dense(torch.cat(filters))

    def _factor(self, name: str, tensor: GGUFTensor) -> Tensor | None:
        """Return the number by which a weight in NVFP4 is multiplied; None if the file has none."""
        stored = tensor.name.removesuffix(".weight") + ".scale"
        # Of Gemma 4's mixtures these are vectors of their own.
        is_other = self.config.mlp_beside_experts and stored.endswith((".ffn_gate_inp.scale", ".ffn_down_exps.scale"))
        if is_other or stored not in self.file.tensors:
            return None
        if tensor.type is not GGUFType.NVFP4:
            raise UnsupportedModelError(
                f"{self.path}: tensor {stored!r} is supported for weights in NVFP4, got {tensor.type.name}"
            )
        scale = self._get(stored)
        expert = expert_index(name)
        shape = (1,) if expert is None else (self.config.num_experts,)
        if scale.shape != shape or scale.type is not GGUFType.F32:
            got = f"{scale.type.name} {scale.shape}"
            raise GGUFFormatError(f"{self.path}: tensor {stored!r} must be F32 with the shape {shape}, got {got}")
        factors = torch.from_numpy(scale.data.reshape(-1).view("<f4"))
        factor = factors[expert or 0]
        if not (factor * E4M3_MAX).isfinite():
            raise GGUFFormatError(f"{self.path}: tensor {stored!r}: expected finite numbers, got {factor:g}")
        return factor

    def _stored(self, name: str) -> str:
        """Return the name of a matrix or vector in the file, without ``.weight`` or ``.bias``."""
        names = ARCHITECTURES[self.config.architecture].names
        if not name.startswith("layers."):
            return names.get(name) or _TOP[name]
        layer, part, rest = split_name(name)
        layer = stored_layer(self.config, layer, part)
        if part in names:
            return f"blk.{layer}.{names[part]}"
        if part in _EXPERTS:
            projection = rest.rpartition(".")[2]
            fused = f"blk.{layer}.ffn_gate_up_{_EXPERTS[part]}"
            if projection in ("gate_proj", "up_proj") and f"{fused}.weight" in self.file.tensors:
                return fused
            single = _FUSED[projection] if self._fused_rows(name) else _LAYER[projection]
            return f"blk.{layer}.{single}_{_EXPERTS[part]}"
        if part == "mlp_norm":
            return f"blk.{layer}.{ARCHITECTURES[self.config.architecture].mlp_norm}"
        if self._is_by_key_head(name):
            return f"blk.{layer}.{_BY_KEY_HEAD[part]}"
        return f"blk.{layer}.{_FUSED[part] if self._fused_rows(name) else _LAYER[part]}"

    def _is_by_key_head(self, name: str) -> bool:
        """Return whether a matrix of linear attention is stored with others, with rows ordered by key head."""
        if not name.startswith("layers."):
            return False
        layer, part, _ = split_name(name)
        return part in _BY_KEY_HEAD and f"blk.{layer}.{_BY_KEY_HEAD[part]}.weight" in self.file.tensors

    def _order(self, name: str, out_features: int) -> Tensor | None:
        """Return the file's row for each row of a matrix, where the converter has changed their order."""
        config, part = self.config, name.rpartition(".")[2]
        architecture = ARCHITECTURES[config.architecture]
        if architecture.permuted and part in ("q_proj", "k_proj"):
            heads = config.num_heads if part == "q_proj" else config.num_kv_heads
            return _unpermuted_rows(heads, out_features // heads, config.rotary_dim)
        sizes = config.states
        if not isinstance(sizes, LinearAttentionConfig):
            return None
        if self._is_by_key_head(name):
            return rows_by_key_head(sizes, part)
        if not architecture.tiled_values:
            return None
        if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            return tiled_rows(sizes, 1)
        if part in ("in_proj_qkv", "in_proj_z", "conv1d"):
            values = tiled_rows(sizes, sizes.value_dim)
            before = out_features - len(values)  # queries and keys
            return torch.cat([torch.arange(before), before + values])
        return None

    def _fused_rows(self, name: str) -> slice | None:
        """Return the rows of a matrix within a fused one; None if it is stored on its own."""
        if not name.startswith("layers."):
            return None
        layer, part, rest = split_name(name)
        block, suffix = f"blk.{stored_layer(self.config, layer, part)}", ".weight"
        if part == "shared_expert":
            part, suffix = rest, "_shexp.weight"
        single = f"{block}.{'ffn_gate' if part == 'up_proj' else _LAYER.get(part)}{suffix}"
        # Without a separate gate, "up" contains both, unless the MLP has no gate.
        if part not in _FUSED or single in self.file.tensors or (part == "up_proj" and not self.config.gated):
            return None
        fused = f"{block}.{_FUSED[part]}{suffix}"
        return self._rows_within(name, part) if fused in self.file.tensors else None

    def _rows_within(self, name: str, part: str) -> slice:
        """Return the rows of ``part`` in the fused matrix that also has the matrix ``name``."""
        layer, owner, _ = split_name(name)
        inner = self.config.shared_intermediate_size if owner == "shared_expert" else None
        return fused_rows(self.config, layer, part, inner)

    def _get(self, name: str) -> GGUFTensor:
        self.file.check_size()
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise GGUFFormatError(f"{self.path}: tensor {name!r} is missing")
        self._read.add(name)
        return tensor


def _unpermuted_rows(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Undo the converter's reordering of Q and K rows: it interleaves rotated pairs, and the kernels expect halves.

    Returns:
        [num_heads * head_dim] int64, the file's row for each row.
    """
    heads = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    pairs = heads[:, :rotary_dim].unflatten(1, (rotary_dim // 2, 2))
    return torch.cat([pairs.transpose(1, 2).flatten(1), heads[:, rotary_dim:]], dim=1).flatten()
