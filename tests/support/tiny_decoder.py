"""A small random decoder of dense weights, to be compared with itself under other weights."""

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import split_name
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.loader import load_decoder
from support.random_checkpoint import Apart, RandomCheckpoint

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
    norm_eps=1e-5,
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

    def form(name: str, values: Tensor) -> Unpacked:
        if not name.startswith("layers."):
            return Dense(values.to(dtype))
        layer, module, _ = split_name(name)
        changed = (values.double() + (deltas or {}).get((layer, module), 0)).to(dtype)
        return Apart(changed) if concatenated and module == "v_proj" else Dense(changed)

    precision = Precision(dtype, 32, 32, dtype)
    return load_decoder(RandomCheckpoint(config, form), precision, None)


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
        block_tables=(table,),
        slot_mappings=(torch.cat(slots),),
        logits_indices=torch.arange(sum(lengths)),
        adapter_ids=ids,
    )


def make_cache(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache.of_model(config, [12], BLOCK_SIZE, dtype, "cpu")
