"""``fastinfer info --memory MODEL``: what a model and its KV cache take and how fast it can be, from the file's header.

A decode step cannot be faster than its weights and cached keys and values can be read once, nor than its operations at
the arithmetic peak; a prefill likewise. Both rates are measured here, by loops that do nothing else (the "roofline" of
Williams et al., 2009, https://doi.org/10.1145/1498765.1498785).
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer import _C, hub
from fastinfer.benchmarks.report import table
from fastinfer.checks import check_int
from fastinfer.engine.engine import EngineConfig
from fastinfer.engine.kv_tensors import available_memory, num_blocks_for, token_bytes
from fastinfer.errors import RequestError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor
from fastinfer.formats.gguf_dequant import unpack_rows
from fastinfer.formats.weight import DenseWeight, make_weight
from fastinfer.info import facts
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.ops.pack import TILE_ROWS

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
MAX_BATCH = 2**20
READ_BYTES = 256 << 20  # more than the last-level cache of nearly all machines
SAMPLE_S = 0.03
SAMPLES = 5


@dataclass(frozen=True)
class Rates:
    """What the CPU can do per second at most: bytes read from memory, operations on bytes and on floating point."""

    read_bytes: float
    byte_operations: float
    float_operations: float

    @classmethod
    def measure(cls) -> "Rates":
        """Best of a few samples on all threads; takes about a second. Other programs' load lowers them."""
        memory = torch.ones(READ_BYTES, dtype=torch.uint8)  # not zeros: those would be one page, mapped everywhere
        float_rates = (_best_rate(name, memory[:0]) for name in ("fp32_fma", "bf16_dot"))
        return cls(_best_rate("read", memory), _best_rate("byte_dot", memory[:0]), max(float_rates))


def _best_rate(resource: str, memory: Tensor) -> float:
    """0 where this CPU has no such instruction."""
    data: Any = memory.numpy()
    passes, samples = 1, list[float]()
    while len(samples) < SAMPLES:
        work, seconds = _C.roofline(resource, data, passes)
        if work == 0:
            return 0.0
        if seconds < SAMPLE_S:
            passes *= 2
        else:
            samples.append(work / seconds)
    return max(samples)


@dataclass
class Weights:
    """Of a model once loaded: bytes in memory, bytes read per step, and operations by the unit that does them.

    ``byte_operations`` and ``float_operations`` are per token in the layers, ``logits`` per sequence and step.
    """

    memory_bytes: int = 0
    step_bytes: int = 0
    byte_operations: int = 0
    float_operations: int = 0
    logits_operations: int = 0

    @classmethod
    def of(cls, file: GGUFFile, config: ModelConfig) -> "Weights":
        weights = cls(memory_bytes=config.max_position * config.rotary_dim * 4)  # the rotary table, fp32
        tied = "output.weight" not in file.tensors
        for name, tensor in file.tensors.items():
            if name == "rope_freqs.weight":  # goes into the rotary table
                continue
            size, dense = _packed_bytes(tensor)
            weights.memory_bytes += size
            if name == "token_embd.weight" and not tied:  # rows of it are read, not all
                continue
            weights.step_bytes += size
            if len(tensor.shape) == 1:
                continue
            operations = 2 * math.prod(tensor.shape)
            if not name.startswith("blk."):
                weights.logits_operations += operations
            elif dense:
                weights.float_operations += operations
            else:
                weights.byte_operations += operations
        return weights


def _packed_bytes(tensor: GGUFTensor) -> tuple[int, bool]:
    """Bytes of a tensor in the kernels' form, and whether that is a dense one.

    One tile of zeros is packed and measured, so that this follows whatever the loader does.
    """
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0], True  # norms are fp32
    rows, row_bytes = tensor.data.shape
    zeros = np.zeros((TILE_ROWS, row_bytes), np.uint8)
    tile = make_weight(unpack_rows(zeros, tensor.type, tensor.name, exact=False), 8)
    parts = (getattr(tile, field.name) for field in fields(tile))  # type: ignore[arg-type]
    tile_bytes = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    dense = isinstance(tile, DenseWeight)
    return (tile_bytes * rows // TILE_ROWS if dense else tile_bytes * -(-rows // TILE_ROWS)), dense


def kv_cache_bytes(config: ModelConfig, num_kv_heads: int, dtype: torch.dtype, context: int, batch: int) -> int:
    """Keys and values of ``batch`` sequences in whole blocks, with their scales where they have some."""
    block_size = EngineConfig().block_size
    slots = batch * num_blocks_for(context, block_size) * block_size
    return slots * token_bytes(config.num_layers, num_kv_heads, config.head_dim, dtype)


def head_layouts(config: ModelConfig) -> dict[str, int]:
    """KV heads by the name of the layout, the model's own first: MHA has one per query head, MQA one in all."""
    own = {config.num_heads: "MHA", 1: "MQA"}.get(config.num_kv_heads, "GQA")
    return {own: config.num_kv_heads} | {"MHA": config.num_heads, "MQA": 1}


def describe(model: str, context: int | None, batch: int, rates: Rates | None = None) -> dict[str, Any]:
    """All figures for JSON, in bytes and seconds. ``rates`` are measured unless given.

    Raises:
        ModelNotFoundError, GGUFFormatError, UnsupportedModelError: as for loading the model.
        RequestError: ``context`` is beyond the model's own limit, or ``batch`` out of range.
    """
    path = hub.resolve(model)
    if path.is_dir():
        raise RequestError(f"--memory: expected a .gguf file, got the folder {path}")
    file = GGUFFile(path)
    config = read_gguf_config(file)
    context = config.max_position if context is None else context
    check_int("--context", context, 1, config.max_position)
    check_int("--batch", batch, 1, MAX_BATCH)
    weights = Weights.of(file, config)
    rates = rates or Rates.measure()
    layouts = head_layouts(config)
    kv_bytes = {
        layout: {_name(dtype): kv_cache_bytes(config, heads, dtype, context, batch) for dtype in KV_DTYPES}
        for layout, heads in layouts.items()
    }
    own = next(iter(layouts))

    def bound(read_bytes: float, tokens: int, attended: int) -> float:
        """Seconds for so many tokens of each sequence, which look at so many positions in all."""
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * attended
        floats = attention + weights.float_operations * tokens
        products = weights.byte_operations * tokens + weights.logits_operations
        seconds = batch * (floats / rates.float_operations + products / rates.byte_operations)
        return max(read_bytes / rates.read_bytes, seconds)

    steps = {name: bound(weights.step_bytes + size, 1, context) for name, size in kv_bytes[own].items()}
    return {
        "model": model,
        "architecture": config.architecture,
        **{name: getattr(config, name) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")},
        "head_layout": own,
        "context": context,
        "batch": batch,
        "weights_bytes": weights.memory_bytes,
        "kv_cache_bytes": kv_bytes,
        "total_bytes": {name: weights.memory_bytes + size for name, size in kv_bytes[own].items()},
        "memory_bytes": facts()["cpu"]["memory"],
        "available_bytes": available_memory("cpu"),
        "measured_per_s": vars(rates),
        "threads": _C.get_num_threads(),
        "decode_step_s": steps,
        "prefill_s": bound(weights.step_bytes, context, context * (context + 1) // 2),
    }


def report(found: dict[str, Any]) -> str:
    """The figures as text."""
    rates, batch, context = found["measured_per_s"], found["batch"], found["context"]
    default = _name(Precision.of("auto").kv_cache_dtype)
    sizes = next(iter(found["kv_cache_bytes"].values()))
    rows = [["KV cache", "size", "with weights", "fits", "decode step", "tokens/s"]]
    for name, seconds in found["decode_step_s"].items():
        total = found["total_bytes"][name]
        fits = "yes" if total <= found["available_bytes"] else "no"
        speed = f"{batch / seconds:.0f}" if batch / seconds >= 10 else f"{batch / seconds:.2g}"
        label = name + (" (default)" if name == default else "")
        rows.append([label, _size(sizes[name]), _size(total), fits, _time(seconds), speed])
    heads = f"{found['num_heads']} query and {found['num_kv_heads']} KV heads of {found['head_dim']}"
    others = [
        f"{layout} {_size(by_dtype[default])}{' (this model)' if layout == found['head_layout'] else ''}"
        for layout, by_dtype in found["kv_cache_bytes"].items()
    ]
    lines = {
        "model": f"{found['model']} ({found['architecture']}), {found['num_layers']} layers, {heads}",
        "weights": f"{_size(found['weights_bytes'])} as packed in memory",
        "memory": f"{_size(found['memory_bytes'])}, {_size(found['available_bytes'])} of it available",
        "measured": f"reads {rates['read_bytes'] / 1e9:.1f} GB/s, byte products {rates['byte_operations'] / 1e9:.0f}"
        f" GOP/s, floating point {rates['float_operations'] / 1e9:.0f} GFLOP/s; threads {found['threads']}",
        "sequences": f"{batch} of {context} tokens; prefill {_time(found['prefill_s'])}",
    }
    text = "\n".join(f"{name:<10} {value}" for name, value in lines.items())
    return (
        f"{text}\n\n{table(rows)}\n\nBy head layout, in {default}: {', '.join(others)}.\n"
        "Times are lower bounds, from the rates that this CPU had just now; the engine takes longer, see "
        "docs/performance.md.\nActivations and workspaces are not counted."
    )


def _name(dtype: torch.dtype) -> str:
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
