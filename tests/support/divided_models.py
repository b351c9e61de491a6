"""Small models of every kind of layer and weight that ranks divide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.mxfp4 import MXFP4_TABLE
from fastinfer.formats.unpacked import Dense, Int8, Lut, Unpacked
from fastinfer.models import Model
from fastinfer.models.config import LatentAttentionConfig, ModelConfig
from fastinfer.models.offload import tensors_of
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from support.gguf_unpack_reference import random_blocks
from support.random_checkpoint import RandomCheckpoint, int4, int8

CONFIG = ModelConfig(
    architecture="toy",
    hidden_size=192,
    intermediate_size=384,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    rotary_dim=32,
    vocab_size=320,
    max_position=128,
    norm_eps=1e-5,
)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [300], [271, 82, 81]]
# Layers of which each rank has some heads, and what all ranks compute: the states below one norm of all heads.
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "norm of all heads": {"qk_norm": "all"},
    "output gate": {"output_gate": True, "num_heads": 6, "num_kv_heads": 6},
    "linear attention": {"states": LinearAttentionConfig(3, 6, 32, 32, kernel_size=4)},
    "short convolution": {"states": ShortConvConfig(192, kernel_size=3, has_bias=True)},
    "mamba2": {"states": Mamba2Config(6, 32, 32, num_groups=3, kernel_size=4)},
    "mamba2 below one norm": {"states": Mamba2Config(6, 32, 32, num_groups=1, kernel_size=4)},
    "experts": {"num_experts": 6, "experts_per_token": 3, "shared_intermediate_size": 192},
    "latent attention": {
        "latent_attention": LatentAttentionConfig(32, 32, plain_dim=32, rotary_dim=32, value_dim=32),
        "num_kv_heads": 1,
        "head_dim": 64,
        "attention_scale": 0.125,
    },
}
# Attention with an MLP, states with experts, and attention with experts, each with an input of its own. Products have
# 256 inputs, which are whole blocks of any GGUF type.
MIXED = replace(
    CONFIG,
    hidden_size=256,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    states=LinearAttentionConfig(2, 4, 64, 64, kernel_size=4),
    state_layers=(False, True, False),
    num_experts=3,
    experts_per_token=2,
    dense_layers=frozenset({0}),
    dense_intermediate_size=256,
    per_layer_size=256,
)


def _gguf(type: GGUFType) -> Callable[[Tensor], Unpacked]:
    """Rows of one random file, at a place that depends on the values."""
    file = random_blocks(type, 4096, MIXED.hidden_size).flatten()

    def form(values: Tensor) -> Unpacked:
        row_bytes = values.shape[1] // type.block_size * type.block_bytes
        rows = file[: len(file) // row_bytes * row_bytes].reshape(-1, row_bytes)
        first = int(1e6 * values[0, 0].abs()) % (len(rows) - len(values))
        return GGUFRows.of(rows[first : first + len(values)], type, exact=False)

    return form


def _lut(table: Tensor) -> Callable[[Tensor], Unpacked]:
    return lambda values: Lut(int4(values).q, int4(values).scales, table=table)


GGUF_FORMS = {
    name: _gguf(GGUFType[name]) for name in ("Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS")
}
FORMS: dict[str, Callable[[Tensor], Unpacked]] = {
    "fp32": Dense,
    "bf16": lambda values: Dense(values.bfloat16()),
    "fp16": lambda values: Dense(values.half()),
    "int4": int4,
    "int4 symmetric": lambda values: replace(int4(values), mins=None),
    "int8": int8,
    "int8 fp32 scales": lambda values: int8(values, torch.float32),
    "int8 permuted": lambda values: replace(int8(values), permutation=torch.arange(values.shape[1]).flip(0)),
    "w8a8": lambda values: Int8(
        (values / values.abs().amax(1, keepdim=True) * 127).round().to(torch.int8),
        values.abs().amax(1, keepdim=True) / 127,
        int8_activations=True,
    ),
    "nf4": _lut(torch.linspace(-1, 1, 16) ** 3),
    "mxfp4": _lut(MXFP4_TABLE),
    **GGUF_FORMS,
}


def model_in(form: str, config: ModelConfig = MIXED) -> RandomCheckpoint:
    """A model whose weights have a form; embeddings and experts have another where theirs must."""

    def stored(name: str, values: Tensor) -> Unpacked:
        if name.endswith("embedding"):
            return FORMS[form if form in GGUF_FORMS and not form.startswith("IQ") else "int8"](values)
        return FORMS["int8" if ".experts." in name and form == "int8 permuted" else form](values)

    return RandomCheckpoint(config, stored)


def weight_bytes(model: Model) -> int:
    """Bytes of all packed matrices."""
    packed = (tensor for tensor in tensors_of(model) if tensor.dtype in (torch.uint8, torch.int8, torch.float16))
    return sum(tensor.nbytes for tensor in packed if tensor.dim() > 1)


def config_of(kind: str) -> ModelConfig:
    """Two layers, of which the first is of this kind if it has states."""
    changes = KINDS[kind]
    return replace(CONFIG, **changes, state_layers=(True, False) if "states" in changes else ())
