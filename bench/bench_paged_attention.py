"""Attention over a paged bf16 cache, compared with torch's SDPA on contiguous keys and values of the same dtype.

The cases on a GPU are decode of one and of many sequences, equal and mixed lengths, quantised caches, and prefill. They
are compared with the flash and cuDNN kernels of SDPA, which know no pages and no ragged batches, and decode also with
FlashAttention 3 and FlashInfer if they are installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import Cases, Setting, Timing, compare, main
from peers.gpu_attention import decode_peers
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastinfer import ops
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import LayerCache

# ---- CPU: SmolLM2-135M ----

CPU_HEADS = 9, 3, 64  # query heads, KV heads, head_dim
# (queries, context): decode at growing contexts, a chunk of prefill, a whole prompt.
CPU_CASES = [(1, 128), (1, 1024), (1, 8192), (64, 1024), (512, 512)]
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
# (sequences, context): decode with the bf16 cache and with quantised caches.
CPU_BATCHES = [(1, 1024), (16, 256)]


def run_cpu(setting: Setting) -> Cases:
    cases = setting.cases
    for queries, context in CPU_CASES:
        batch = make_batch([queries], [context], CPU_HEADS, 32, setting)
        k, v = batch.dense()
        mask = torch.arange(context) <= torch.arange(context - queries, context)[:, None]

        def masked_sdpa(k=k, v=v, mask=mask, batch=batch):  # type: ignore[no-untyped-def]
            return F.scaled_dot_product_attention(batch.dense_queries(), k, v, attn_mask=mask, enable_gqa=True)

        cases[f"queries={queries} context={context}"] = compare(
            {"fastinfer": lambda batch=batch: batch.attend(), "torch SDPA": masked_sdpa},
            [()],
            repeats=setting.repeats,
            bytes_moved=2 * k.nbytes,
        )
    for seqs, context in CPU_BATCHES:
        batches = {
            name: make_batch([1] * seqs, [context] * seqs, CPU_HEADS, 32, setting, dtype)
            for name, dtype in (("bfloat16", torch.bfloat16), *QUANTIZED.items())
        }
        caches = {name: lambda batch=batch: batch.attend() for name, batch in batches.items()}
        cases[f"decode, {seqs} x {context}, by cache"] = compare(caches, [()], repeats=setting.repeats)
    return cases


# ---- GPU: an 8B model ----

HEADS = 32, 8, 128
BLOCK_SIZE = 16
# (sequences, context): one sequence from short to long, then caches of at least 1 GB.
DECODE = [(1, 1024), (1, 8192), (1, 65536), (16, 8192), (64, 4096), (256, 2048)]
MIXED = [200, 8000, 350, 1500, 120, 32000, 900, 4096] * 8
PREFILL = [1024, 8192]
COLD_BYTES = 256 << 20


def run_cuda(setting: Setting) -> Cases:
    cases = setting.cases
    for seqs, context in DECODE:
        lengths = [setting.size(context, 100)] * setting.size(seqs, 2)
        cases[f"decode, {seqs} x {context}"] = decode(setting, lengths, dense=True)
    mixed = MIXED[: setting.size(len(MIXED), 4)]
    mixed = [setting.size(length, length % 97 + 1) for length in mixed]
    cases["decode, 64 of 120 to 32000"] = decode(setting, mixed, dense=False)
    for name, dtype in QUANTIZED.items():
        lengths = [setting.size(8192, 100)] * setting.size(16, 2)
        cases[f"decode, 16 x 8192, {name}"] = decode(setting, lengths, dense=False, cache_dtype=dtype)
    for tokens in PREFILL:
        cases[f"prefill, causal, {tokens}"] = prefill(setting, setting.size(tokens, 60))
    cases["prefill, chunk of 512 after 7680"] = prefill(setting, setting.size(512, 20), setting.size(7680, 60))
    return cases


def decode(
    setting: Setting, lengths: list[int], dense: bool, cache_dtype: torch.dtype = torch.bfloat16
) -> list[Timing]:
    def make() -> Batch:
        return make_batch([1] * len(lengths), lengths, HEADS, BLOCK_SIZE, setting, cache_dtype)

    first = make()
    size = first.cache_bytes(sum(lengths))
    copies = 0 if setting.rehearsal else min(COLD_BYTES // size, 63)
    batches = [first, *(make() for _ in range(copies))]
    inputs = [(batch, *(batch.dense() if dense else ())) for batch in batches]
    candidates: dict[str, Callable[..., object]] = {"fastinfer": lambda batch, *_: batch.attend()}
    if dense:
        for name, backend in BACKENDS.items():
            candidates[name] = lambda batch, k, v, backend=backend: sdpa(batch.dense_queries(), k, v, backend, False)
    if cache_dtype == torch.bfloat16 and setting.device == "cuda":
        candidates |= decode_peers(batches)
    return compare_batches(candidates, inputs, setting, bytes_moved=size)


def prefill(setting: Setting, tokens: int, cached: int = 0) -> list[Timing]:
    batch = make_batch([tokens], [tokens + cached], HEADS, BLOCK_SIZE, setting)
    candidates: dict[str, Callable[..., object]] = {"fastinfer": lambda batch, k, v: batch.attend()}
    if not cached:  # SDPA's causal mask begins at the first key
        for name, backend in BACKENDS.items():
            candidates[name] = lambda batch, k, v, backend=backend: sdpa(batch.dense_queries(), k, v, backend, True)
    pairs = tokens * cached + tokens * (tokens + 1) // 2
    inputs = [(batch, *batch.dense())]
    return compare_batches(candidates, inputs, setting, flops=4 * pairs * HEADS[0] * HEADS[2])


BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def compare_batches(
    candidates: dict[str, Callable[..., object]], inputs: list[tuple[Any, ...]], setting: Setting, **size: int
) -> list[Timing]:
    """Call compare() with the queries as the first input, because it takes the device from tensors among the inputs."""
    with_queries = [(batch.q, batch, *rest) for batch, *rest in inputs]
    runs = {name: lambda q, *rest, run=run: run(*rest) for name, run in candidates.items()}
    return compare(runs, with_queries, repeats=setting.repeats, **size)


# ---- inputs ----


@dataclass(frozen=True)
class Batch:
    """Arguments of paged_attention, with the plan that is made once per step."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    ragged: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, torch.Tensor]

    def attend(self) -> torch.Tensor:
        return ops.paged_attention(self.q, *self.caches, *self.ragged, **self.options)

    def cache_bytes(self, positions: int) -> int:
        scales = (self.options[name] for name in ("k_scale", "v_scale") if name in self.options)
        return positions * sum(tensor[0, 0].nbytes for tensor in (*self.caches, *scales))

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [seqs, kv_heads, context, head_dim] for SDPA; all sequences have the same length."""
        table, seq_lens, _ = self.ragged
        context = int(seq_lens[0])
        k, v = (cache[table.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in self.caches)
        return k, v

    def dense_queries(self) -> torch.Tensor:
        return self.q.unflatten(0, (self.ragged[0].shape[0], -1)).transpose(1, 2)


def make_batch(
    queries: list[int],
    lengths: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    setting: Setting,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    q_heads, kv_heads, head_dim = heads
    counts = [-(-length // block_size) for length in lengths]
    pages = torch.randperm(sum(counts), dtype=torch.int32, device=setting.device).split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    shape = (sum(counts), block_size, kv_heads, head_dim)
    options = {}
    if cache_dtype == torch.bfloat16:
        caches = [torch.randn(shape, device=setting.device, dtype=cache_dtype) for _ in "kv"]
    elif cache_dtype == torch.uint8:
        cache = LayerCache.empty(KVShape(kv_heads, head_dim), *shape[:2], cache_dtype, setting.device)
        caches = [cache.k.random_(), cache.v.random_()]
        scale = torch.tensor([1 / 7.5, -1.0])
        options = {"k_scale": cache.k_scale.copy_(scale), "v_scale": cache.v_scale.copy_(scale)}
    else:
        caches = [(torch.randn(shape, device=setting.device) * 30).clamp(-127, 127).to(cache_dtype) for _ in "kv"]
        options = {f"{name}_scale": torch.rand(shape[:3], device=setting.device) / 30 for name in "kv"}
    starts = torch.tensor([0, *queries], device=setting.device).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
    options["plan"] = ops.paged_attention_plan(seq_lens, starts, *heads)
    q = torch.randn(sum(queries), q_heads, head_dim, device=setting.device).bfloat16()
    return Batch(q, (caches[0], caches[1]), (table, seq_lens, starts), options)


if __name__ == "__main__":
    main("paged_attention", run_cpu, run_cuda)
