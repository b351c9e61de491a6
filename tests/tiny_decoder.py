"""A small random decoder of dense weights, to be compared with itself under other weights."""

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch import Batch
from fastinfer.engine.kv_tensors import KVCacheTensors
from fastinfer.formats.weight import ConcatenatedWeight, DenseWeight
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.lora import module_sizes
from fastinfer.ops.pack import interleave_gate_up

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    vocab_size=50,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
BLOCK_SIZE = 16


def make_decoder(
    config: ModelConfig = CONFIG,
    deltas: dict[tuple[int, str], Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    concatenated: bool = False,
) -> Decoder:
    """Always the same weights, with ``deltas`` added by layer and module; Q, K and V as one weight or as three."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def layer(index: int) -> DecoderLayer:
        weights = {}
        for name, (features, out) in module_sizes(config).items():
            weight = random(out, features).double() + (deltas or {}).get((index, name), 0)
            weights[name] = weight.to(dtype)
        q, k, v = (DenseWeight(weights[name]) for name in ("q_proj", "k_proj", "v_proj"))
        return DecoderLayer(
            attention_norm=1 + random(config.hidden_size),
            qkv=ConcatenatedWeight((q, k, v))
            if concatenated
            else DenseWeight(torch.cat([q.values, k.values, v.values])),
            output=DenseWeight(weights["o_proj"]),
            mlp_norm=1 + random(config.hidden_size),
            gate_up=DenseWeight(interleave_gate_up(weights["gate_proj"], weights["up_proj"])),
            down=DenseWeight(weights["down_proj"]),
        )

    embedding = DenseWeight((8 * random(config.vocab_size, config.hidden_size)).to(dtype))
    return Decoder(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=1 + random(config.hidden_size),
        lm_head=embedding,
        cos_sin_cache=ops.cos_sin_cache(config.rotary_dim, config.max_position, config.rope_theta),
    )


def make_batch(lengths: list[int], adapters: list[int] | None = None, seed: int = 0) -> Batch:
    """A prefill of sequences of random tokens, each with its adapter; a sequence's tokens depend on its length."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots, first = [], 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(length) + first * BLOCK_SIZE)
        first += count
    tokens = [
        torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed + length))
        for length in lengths
    ]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    ids = None if adapters is None else torch.tensor(adapters, dtype=torch.int32).repeat_interleave(starts.diff())
    return Batch(
        token_ids=torch.cat(tokens),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        query_start=starts,
        seq_lens=starts.diff(),
        block_table=table,
        slot_mapping=torch.cat(slots),
        logits_indices=torch.arange(sum(lengths)),
        adapter_ids=ids,
    )


def make_cache(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> KVCacheTensors:
    return KVCacheTensors.empty(config.num_layers, 12, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype, "cpu")
