"""A small random decoder of bf16 hidden states whose sizes the CUDA kernels take, with weights of every form."""

import torch
from torch import Tensor
from toy import VOCAB_SIZE

from fastinfer import ops
from fastinfer.formats.gguf_dequant import Dense, Int4, Int8
from fastinfer.formats.weight import ConcatenatedWeight, Weight, make_weight
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder, DecoderLayer

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
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def mixed_decoder(device: str) -> Decoder:
    """Always the same model: a layer of 4-bit weights with minimums, one of dense weights, and one of 8 bits with a QKV
    weight in three parts; a tied 8-bit embedding. On the CPU products are in fp32, as is the sum of theirs on a GPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def weight(kind: str, rows: int, columns: int) -> Weight:
        values = random(rows, columns) / columns**0.5
        groups = values.view(rows, -1, 32)
        if kind == "int4":
            mins = groups.amin(-1).half()
            scales = ((groups.amax(-1) - mins.float()) / 15).half()
            q = ((groups - mins.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15).byte()
            return make_weight(Int4(q.view(rows, columns), scales, mins), 32, device)
        if kind == "int8":
            scales = (groups.abs().amax(-1) / 127).half()
            q = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
            return make_weight(Int8(q.view(rows, columns), scales, None), 32, device)
        return make_weight(Dense(values), 32, device, torch.bfloat16)

    def layer(kind: str) -> DecoderLayer:
        hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
        heads = [count * CONFIG.head_dim for count in (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)]
        parts = ConcatenatedWeight(tuple(weight(kind, rows, hidden) for rows in heads)) if kind == "int8" else None
        return DecoderLayer(
            attention_norm=1 + random(hidden).to(device) / 10,
            qkv=parts or weight(kind, sum(heads), hidden),
            output=weight(kind, hidden, heads[0]),
            mlp_norm=1 + random(hidden).to(device) / 10,
            gate_up=weight(kind, 2 * inner, hidden),
            down=weight(kind, hidden, inner),
        )

    embedding = weight("int8", VOCAB_SIZE, CONFIG.hidden_size)
    return Decoder(
        config=CONFIG,
        dtype=torch.bfloat16,
        embedding=embedding,
        layers=tuple(layer(kind) for kind in ("int4", "dense", "int8")),
        norm=torch.full((CONFIG.hidden_size,), 4.0, device=device),
        lm_head=embedding,
        cos_sin_cache=ops.cos_sin_cache(CONFIG.rotary_dim, CONFIG.max_position, CONFIG.rope_theta).to(device),
    )
