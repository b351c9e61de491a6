"""A small random decoder of bf16 hidden states whose sizes the CUDA kernels take, with weights of every form."""

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.loader import load_decoder
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.toy import VOCAB_SIZE

CONFIG = ModelConfig(
    architecture="random",
    hidden_size=128,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=64,
    vocab_size=VOCAB_SIZE,
    max_position=96,
    norm_eps=1e-5,
)


def mixed_decoder(device: str) -> Decoder:
    """Always the same model: a layer of 4-bit weights with minimums, one of dense weights, and one of 8 bits with a QKV
    weight in three parts; a tied 8-bit embedding. On the CPU products are in fp32, as is the sum of theirs on a GPU."""

    def form(name: str, values: Tensor) -> Unpacked:
        if name.startswith("layers.0."):
            return int4(values)
        if name.startswith("layers.1."):
            return Dense(values.bfloat16())
        return int8(values, scale_dtype=torch.float32 if name == "layers.2.v_proj" else torch.float16)

    precision = Precision(torch.bfloat16, 32, 32, torch.bfloat16)
    return load_decoder(RandomCheckpoint(CONFIG, form), precision, None, device)
