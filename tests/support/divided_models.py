"""Small models of every kind of layer and weight that ranks divide."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, Int8, Lut, Unpacked
from fastinfer.models import Model
from fastinfer.models.config import LatentAttentionConfig, ModelConfig
from fastinfer.models.offload import tensors_of
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from support.random_checkpoint import int4, int8

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
FORMS: dict[str, Callable[[Tensor], Unpacked]] = {
    "dense": lambda values: Dense(values.bfloat16()),
    "int4": int4,
    "int8": int8,
    "int8 permuted": lambda values: replace(int8(values), permutation=torch.arange(values.shape[1]).flip(0)),
    "w8a8": lambda values: Int8(
        (values / values.abs().amax(1, keepdim=True) * 127).round().to(torch.int8),
        values.abs().amax(1, keepdim=True) / 127,
        int8_activations=True,
    ),
    "lut": lambda values: Lut(int4(values).q, int4(values).scales, table=torch.arange(-8.0, 8.0)),
}


def weight_bytes(model: Model) -> int:
    """Bytes of all packed matrices."""
    packed = (tensor for tensor in tensors_of(model) if tensor.dtype in (torch.uint8, torch.float16))
    return sum(tensor.nbytes for tensor in packed if tensor.dim() > 1)


def config_of(kind: str) -> ModelConfig:
    """Two layers, of which the first is of this kind if it has states."""
    changes = KINDS[kind]
    return replace(CONFIG, **changes, state_layers=(True, False) if "states" in changes else ())
