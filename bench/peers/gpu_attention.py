"""Attention kernels of other projects over the same paged caches, those of them that are installed."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

Run = Callable[[], torch.Tensor]


def flash_attention_3(batch: Any) -> Run:
    from flash_attn_interface import flash_attn_with_kvcache

    table, seq_lens, _ = batch.ragged
    pages = {"cache_seqlens": seq_lens, "page_table": table, "causal": True}
    return lambda: flash_attn_with_kvcache(batch.q[:, None], *batch.caches, **pages)


def flashinfer(batch: Any) -> Run:
    """Plan on the host, as its engines do once per step."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    table, seq_lens, _ = batch.ragged
    (_, q_heads, head_dim), (_, block_size, kv_heads, _) = batch.q.shape, batch.caches[0].shape
    counts = -(-seq_lens // block_size)
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=table.device), "NHD", use_tensor_cores=True
    )
    last = seq_lens - (counts - 1) * block_size
    dtypes = {"q_data_type": batch.q.dtype, "kv_data_type": batch.caches[0].dtype}
    wrapper.plan(starts, table[used], last, q_heads, kv_heads, head_dim, block_size, **dtypes)
    return lambda: wrapper.run(batch.q, batch.caches)


# Name in tables: package, and what prepares the decoding of a batch.
PEERS: dict[str, tuple[str, Callable[[Any], Run]]] = {
    "FlashAttention 3": ("flash_attn_interface", flash_attention_3),
    "FlashInfer": ("flashinfer", flashinfer),
}


def decode_peers(batches: list[Any]) -> dict[str, Callable[..., torch.Tensor]]:
    """Prepare every installed peer for these batches; one that fails raises its error when it is called."""
    return {
        name: _prepared(prepare, batches)
        for name, (package, prepare) in PEERS.items()
        if find_spec(package) is not None
    }


def _prepared(prepare: Callable[[Any], Run], batches: list[Any]) -> Callable[..., torch.Tensor]:
    try:
        runs = {id(batch): prepare(batch) for batch in batches}
    except Exception as error:
        failure = error

        def fail(batch: Any, *_: Any) -> torch.Tensor:
            raise failure

        return fail
    return lambda batch, *_: runs[id(batch)]()
