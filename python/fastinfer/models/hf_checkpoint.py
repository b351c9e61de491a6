"""Tensors of a Hugging Face folder (safetensors files and ``config.json``) by the project's names."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, FastinferError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.linear_tensors import DENSE_DTYPES, ExpertTensors, LinearTensors
from fastinfer.formats.mxfp4 import MX_GROUP, MXFP4Experts
from fastinfer.formats.quantized_checkpoint import CheckpointFormat, PackedSizes, parse_quantization_config, read_with
from fastinfer.formats.safetensors_folder import SafetensorsFolder
from fastinfer.formats.text_fields import text_fields
from fastinfer.formats.unpacked import Dense, Lut, Unpacked, concatenate
from fastinfer.models.checkpoint import (
    LOOKED_UP,
    XIELU_PARAMETERS,
    ModelPart,
    check_draft_tokens,
    decoder_layers,
    expert_index,
    fused_rows,
    is_state_part,
    rows_by_head,
    rows_by_key_head,
    split_name,
    stored_layer,
)
from fastinfer.models.config import ModelConfig
from fastinfer.models.families import FAMILIES, Family
from fastinfer.models.hf_config import parse_hf_config
from fastinfer.models.state_config import LinearAttentionConfig

D2T = "d2t"
# Where Model Optimizer keeps the settings of a checkpoint without a ``quantization_config``.
MODELOPT_CONFIG = "hf_quant_config.json"
# Vectors that are no module's weight or bias.
PARAMETERS = (
    *("sinks", "router_bias", "A_log", "D", "dt_bias", "layer_scale", "router_scale", "expert_scale"),
    *XIELU_PARAMETERS,
)
# Beginnings of the names of matrices that methods quantise.
LINEAR = ("layers.", "lm_head", "fc", "selector_hidden", "markov_w2")
# Names of a matrix in the methods.
MATRICES = ("weight", "qweight", "weight_packed")
# Families whose matrices MLX keeps, except that it joins those of all experts (``switch_mlp``). Of others it stores
# some tensors in another order, or with another offset.
MLX_FAMILIES = frozenset(
    f"{name}For{kind}"
    for kind, names in {
        "CausalLM": (
            "Cohere Cohere2 Exaone4 Gemma2 Gemma3 Glm4Moe Llama MiniMaxM2 Ministral3 Mistral Mixtral Olmo2 Olmo3 Phi3 "
            "Qwen2 Qwen2Moe Qwen3 Qwen3Moe SmolLM3"
        ),
        "ConditionalGeneration": "Gemma3 Mistral3 Qwen2VL Qwen2_5_VL Qwen3VL",
    }.items()
    for name in names.split()
)


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
        self._fields = JsonFields.read(path / "config.json", CheckpointFormatError)
        self.config, self._family = self._read_config()
        self.tensors = SafetensorsFolder(path)
        self._prefix, self._head_prefix = self._find_prefixes()
        self._is_stacked = self._has_stacked_experts()
        self._check_output_layer()
        self._exact = exact
        self._is_mlx = self._fields.values.get("quantization") is not None
        self._quantization = self._quantization_config()
        self._packed_experts: dict[str, MXFP4Experts] = {}  # of the layer that is read

    @property
    def files(self) -> list[Path]:
        return sorted([*self.tensors.files, *self.path.glob("*.json")])

    def weight_bytes(self, device: str) -> int:
        return self.part_bytes(device).total()

    def part_bytes(self, device: str) -> Counter[ModelPart]:
        prefix = self._with_prefix(f"{self._family.top['layers']}.")
        router, experts = (f"{self._family.layer.get(part)}." for part in ("router", "experts"))
        embedding = self._family.top.get("embedding")  # layers for multi-token prediction read the model's
        looked_up = None if embedding is None else self._with_prefix(f"{embedding}.weight")
        layers, packed = decoder_layers(self.config), PackedSizes(self._quantization, self._exact)
        sizes: Counter[ModelPart] = Counter()
        for name in self._loaded_names():
            index, _, rest = name.removeprefix(prefix).partition(".")
            layer = int(index) if index.isdecimal() else None
            if layer is None or layer in layers:
                is_experts = rest.startswith((experts, "mlp.switch_mlp.")) and not rest.startswith(router)
                part = ModelPart(None if layer is None else layers[layer], layer is not None and is_experts)
                stored, dtype = self.tensors.num_bytes(name), self.tensors.header(name)[1]
                sizes[part] += packed.num_bytes(name, stored, dtype, is_looked_up=name == looked_up)
        return sizes

    def __contains__(self, name: str) -> bool:
        return any(f"{self.stored_name(name)}.{part}" in self.tensors for part in MATRICES)

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        module = self.stored_name(name)
        rows = self._rows(name)
        if (expert := self._stacked_expert(name)) is not None:
            index, whole = rows or (slice(None), out_features)
            assert isinstance(index, slice)
            weight = self._expert(module, expert, index, whole, in_features)
        else:
            # No method quantises a convolution, and MLX alone the embedding.
            is_linear = (name.startswith(LINEAR) or self._is_mlx) and not name.endswith(".conv1d")
            weight = self._linear(module, self._joined_expert(name)) if is_linear else self._filters(name, module)
            if self._family.transposed and name.startswith("layers.") and isinstance(weight, Dense):
                weight = Dense(weight.values.T.contiguous())
            if rows is not None and weight.shape[0] == rows[1]:
                weight = weight.rows(rows[0])
        if weight.shape != (out_features, in_features):
            raise CheckpointFormatError(
                f"{self.path}: {module} must have the shape {[out_features, in_features]}, got {list(weight.shape)}"
            )
        return weight

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        weight = self.linear(name, out_features, in_features)
        yield weight.integers() if name in LOOKED_UP and isinstance(weight, Lut) else weight

    def vector(self, name: str, size: int) -> Tensor:
        is_bias, module = name.endswith(".bias"), name.removesuffix(".bias")
        part = module.rpartition(".")[2]
        expert = self._stacked_expert(module)
        stored = self.stored_name(module)
        if is_bias:
            stored += ".bias" if expert is None else "_bias"
        elif part not in PARAMETERS:
            stored += ".weight"
        rows = self._rows(module) if is_bias else None
        if part == "router_bias" and self._family.optional_router_bias and stored not in self.tensors:
            return torch.zeros(size)
        values = self._get(stored)
        if expert is not None:
            self._check_stack(stored, values, size if rows is None else rows[1])
            values = values[expert]
        values = values.float()
        if rows is not None and len(values) == rows[1]:
            values = values[rows[0]]
        if part == "router_bias" and len(values) == 1:
            values = values[0]  # ERNIE's has a dimension more, for groups of experts
        elif part in (*XIELU_PARAMETERS, "A_log"):
            values = values.view(-1)  # some are numbers without a dimension, or have more
        if values.shape != (size,):
            raise CheckpointFormatError(
                f"{self.path}: tensor {stored!r} must have the shape {[size]}, got {list(values.shape)}"
            )
        return values + self.norm_offset(name) if name.endswith("norm") else values.clone()

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
        check_draft_tokens(tokens, vocab_size, f"{self.path}: tensor {D2T!r}", CheckpointFormatError)
        return tokens

    def layout(self, layer: int) -> frozenset[tuple[str, tuple[int, ...], str]]:
        stored = self.config.stored_layers[layer] if self.config.stored_layers else (layer,)
        layout = set()
        for place, number in enumerate(stored):
            prefix = self._with_prefix(f"{self._family.top['layers']}.{number}.")
            names = [name for name in self.tensors.names if name.startswith(prefix)]
            layout |= {(f"{place}.{name.removeprefix(prefix)}", *self.tensors.header(name)) for name in names}
        return frozenset(layout)

    def unread(self) -> list[str]:
        return []  # folders of quantised models have tensors that are not needed

    def release(self) -> None:
        self._packed_experts = {}
        self.tensors.release()

    def _loaded_names(self) -> Iterator[str]:
        """Return the names of the tensors that are loaded, or belong to layers of which some are."""
        # A folder may have more: layers for images, or layers that predict tokens after the next one.
        loaded = (self._prefix, f"{self._head_prefix}{self._family.top.get('lm_head', 'lm_head')}.")
        return (name for name in self.tensors.names if name.startswith(loaded))

    def _read_config(self) -> tuple[ModelConfig, Family]:
        """Return the configuration, and the names of the tensors."""
        config = parse_hf_config(self._fields)
        return config, FAMILIES[config.architecture]

    @functools.cached_property
    def _format(self) -> CheckpointFormat | None:
        return parse_quantization_config(self._quantization)

    @property
    def is_quantized(self) -> bool:
        """Whether config.json has a ``quantization_config``."""
        return self._quantization is not None

    @property
    def is_transposed(self) -> bool:
        """Whether matrices are stored as [in_features, out_features]."""
        return self._family.transposed

    def norm_offset(self, name: str) -> float:
        """Return the number that is added to the stored weights of a norm."""
        is_plain = name.endswith(".gated_norm") or (name == "norm" and self._family.plain_last_norm)
        return 0.0 if is_plain else self._family.norm_offset

    def stack_of(self, name: str) -> str | None:
        """Return the name of the tensor with an expert's projection and those of all others; None if it has its own.

        Their biases are in the tensor with this name and ``_bias``.
        """
        return None if self._stacked_expert(name) is None else self.stored_name(name)

    def single_module(self, name: str) -> tuple[str, Tensor | None]:
        """Return the name of a module where each expert has modules of its own, and the numbers of its rows there.

        ``None`` stands for all rows.
        """
        rows = self._rows(name, is_single=True)
        return self.stored_name(name, is_single=True), None if rows is None else torch.arange(rows[1])[rows[0]]

    def stored_name(self, name: str, *, is_single: bool = False) -> str:
        """Return the name of a module in the checkpoint, or in one where each expert has modules of its own."""
        top = self._family.top
        if name.startswith("layers."):
            layer, part, rest = split_name(name)
            owner = f"{top['layers']}.{stored_layer(self.config, layer, part)}"
            module = f"{owner}.{self._family.layer[part]}"
            other = self._family.other_names.get(part)
            if other and f"{self._with_prefix(module)}.weight" not in self.tensors:
                module = f"{owner}.{other}"
            if rest:
                *expert, projection = rest.split(".")  # a shared expert has no number
                is_stacked = self._is_stacked and bool(expert) and not is_single
                if expert and self._is_mlx:
                    return self._with_prefix(f"{module.rpartition('.')[0]}.switch_mlp.{projection}")
                if expert and not is_stacked:
                    module += f".{expert[0]}"
                module += f".{self._expert_names(is_stacked, is_shared=not expert)[projection]}"
        else:
            module = top.get(name, name)
        return self._with_prefix(module)

    def _expert_names(self, is_stacked: bool, is_shared: bool) -> Mapping[str, str]:
        """Return the checkpoint's names of the parts of an expert."""
        if is_stacked:
            return self._family.stacked
        return (self._family.shared if is_shared else {}) or self._family.expert

    def _dense(self, module: str) -> Dense:
        values = self._get(f"{module}.weight")
        if values.dim() == 3 and values.shape[1] == 1:  # a convolution of each channel by itself
            values = values[:, 0]
        if values.dim() != 2:
            raise CheckpointFormatError(
                f"{self.path}: tensor {module + '.weight'!r} must have two dimensions, "
                f"got the shape {list(values.shape)}"
            )
        return Dense(values)

    def _filters(self, name: str, module: str) -> Dense:
        """Read a matrix that is not quantised, or the filters of a convolution, which may be several tensors."""
        parts = self._family.conv_parts if name.endswith(".conv1d") else ()
        if not parts or f"{module}.weight" in self.tensors:
            return self._dense(module)
        owner = module.removesuffix(self._family.layer["conv1d"])
        return concatenate([self._dense(f"{owner}{part}") for part in parts])

    def _linear(self, module: str, expert: int | None) -> Unpacked:
        tensors = self.tensors if expert is None else ExpertTensors(self.tensors, expert)
        try:
            return read_with(self._format, tensors, module, exact=self._exact)
        except FastinferError as error:
            raise type(error)(f"{self.path}: {error}") from None

    def _stacked_expert(self, name: str) -> int | None:
        """Return the index of an expert whose projection is stored in one tensor with those of the others."""
        return expert_index(name) if self._is_stacked else None

    def _joined_expert(self, name: str) -> int | None:
        """Return the same of an expert whose tensors MLX has joined, each of them along a first dimension."""
        return expert_index(name) if self._is_mlx else None

    def _expert(self, module: str, expert: int, rows: slice, out_features: int, in_features: int) -> Unpacked:
        """Read rows of one expert's matrix [out_features, in_features], which is stored with those of the others."""
        if f"{module}_blocks" in self.tensors:
            packed = self._packed(module)
            self._check_stack(f"{module}_blocks", packed.blocks, out_features, in_features // MX_GROUP, 16)
            return packed.expert(expert, rows)
        values, order = self._get(module), self._family.stacked_order
        if order == "any" and in_features == out_features:
            raise UnsupportedModelError(
                f"{self.path}: tensor {module!r}: the order of its dimensions is not known, because both have "
                f"{in_features} elements"
            )
        transposed = list(values.shape[1:]) == [in_features, out_features]
        if order == "in_out" or (order == "any" and transposed):
            self._check_stack(module, values, in_features, out_features)
            return Dense(values[expert].T[rows])
        self._check_stack(module, values, out_features, in_features)
        return Dense(values[expert][rows])

    def _packed(self, module: str) -> MXFP4Experts:
        """Read a projection of all experts in MXFP4, once for a layer."""
        if module not in self._packed_experts:
            owner, _, name = module.rpartition(".")
            try:
                self._packed_experts[module] = MXFP4Experts.read(LinearTensors(self.tensors, owner), name)
            except FastinferError as error:
                raise type(error)(f"{self.path}: {error}") from None
        return self._packed_experts[module]

    def _check_stack(self, name: str, values: Tensor, *sizes: int) -> None:
        """Refuse a tensor of all experts that does not have these sizes for each."""
        shape = [self.config.num_experts, *sizes]
        if list(values.shape) != shape:
            raise CheckpointFormatError(
                f"{self.path}: tensor {name!r} must have the shape {shape}, got {list(values.shape)}"
            )

    def _get(self, name: str) -> Tensor:
        values = self.tensors.get(name)
        if values is None:
            raise CheckpointFormatError(f"{self.path}: tensor {name!r} is missing")
        if values.dtype not in DENSE_DTYPES:
            raise CheckpointFormatError(f"{self.path}: tensor {name!r} must be of a float dtype, got {values.dtype}")
        return values

    def _rows(self, name: str, *, is_single: bool = False) -> tuple[slice | Tensor, int] | None:
        """Return the rows of a matrix within a fused one, and how many that has; None if it is stored on its own.

        With ``is_single`` those in a checkpoint where each expert has modules of its own.
        """
        if not name.startswith("layers.") or name.endswith("norm"):  # attention and MLP may share a norm
            return None
        layer, part, rest = split_name(name)
        names = self._family.layer
        if rest:
            part = rest.rpartition(".")[2]
            is_stacked = self._stacked_expert(name) is not None and not is_single
            names = self._expert_names(is_stacked, is_shared="." not in rest)
        # Layers with a state may have the same names as those with attention.
        kind = is_state_part(part)
        same = [other for other, stored in names.items() if stored == names[part] and is_state_part(other) == kind]
        if len(same) == 1:
            return None
        if part.startswith("in_proj_"):
            assert isinstance(self.config.states, LinearAttentionConfig)
            parts = {other: rows_by_key_head(self.config.states, other) for other in same}
            return parts[part], sum(map(len, parts.values()))
        if self._family.qkv_by_head:
            rows_of = {other: rows_by_head(self.config, layer, other) for other in same}
            return rows_of[part], sum(map(len, rows_of.values()))
        is_shared = bool(rest) and "." not in rest
        inner = self.config.shared_intermediate_size if is_shared else None
        rows = {other: fused_rows(self.config, layer, other, inner) for other in same}
        return rows[part], max(slice_.stop for slice_ in rows.values())

    def _with_prefix(self, name: str) -> str:
        """Replace the family's prefix of a name by that of the checkpoint."""
        prefix = self._family.prefix
        if name.startswith(prefix):
            return self._prefix + name.removeprefix(prefix)
        return self._head_prefix + name

    def _quantization_config(self) -> dict[str, Any] | None:
        """Return the settings of the method; None for a checkpoint that is not quantised."""
        if self._is_mlx:
            if self.config.architecture not in MLX_FAMILIES:
                raise UnsupportedModelError(
                    f"{self.path / 'config.json'}: quantization: MLX's format is not implemented for "
                    f"{self.config.architecture}"
                )
            return {**self._fields.get("quantization", dict), "quant_method": "mlx"}
        for place in (self._fields, text_fields(self._fields)):
            if place is not None and (settings := place.object("quantization_config")) is not None:
                return settings.values
        path = self.path / MODELOPT_CONFIG
        if not path.exists():
            return None
        return {**JsonFields.read(path, CheckpointFormatError).get("quantization", dict), "quant_method": "modelopt"}

    def _find_prefixes(self) -> tuple[str, str]:
        """Return the prefixes of the decoder's tensors and of its output layer's."""
        prefix = self._family.prefix
        layers = self._family.top["layers"].removeprefix(prefix) + "."
        candidates = [
            (prefix, ""),
            ("", ""),
            ("backbone.", ""),
            ("model.language_model.", ""),
            ("language_model.model.", "language_model."),
            ("model.text_model.", ""),
            ("thinker.model.", "thinker."),
        ]
        found = (pair for pair in candidates if any(name.startswith(pair[0] + layers) for name in self.tensors.names))
        decoder, head = next(found, candidates[0])
        # Files of models with images may have the output layer elsewhere.
        output = self._family.top.get("lm_head", "lm_head")
        heads = (
            name
            for name in (head, "", "language_model.")
            if any(f"{name}{output}.{part}" in self.tensors for part in MATRICES)
        )
        return decoder, next(heads, head)

    def _has_stacked_experts(self) -> bool:
        """Return whether projections of all experts are stored as one tensor."""
        stacked = tuple(f".{self._family.layer.get('experts')}.{name}" for name in self._family.stacked.values())
        layers = self._with_prefix(f"{self._family.top['layers']}.")
        return any(part in name for name in self.tensors.names if name.startswith(layers) for part in stacked)

    def _check_output_layer(self) -> None:
        """Refuse a checkpoint without the output layer that it says to have."""
        places = [self._fields, text_fields(self._fields)]
        said = [place.get("tie_word_embeddings", bool, None) for place in places if place is not None]
        if False in said and True not in said and "lm_head" not in self:
            raise CheckpointFormatError(
                f"{self.path}: tensor {self.stored_name('lm_head') + '.weight'!r} is missing, and config.json says "
                "that the output layer is not the embedding (tie_word_embeddings)"
            )
