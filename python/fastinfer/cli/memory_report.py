"""``fastinfer info --memory MODEL``: what a model and its KV cache take and how fast it can be, before it is loaded.

A decode step cannot be faster than its weights and cached keys and values can be read once, nor than its operations at
the arithmetic peak; a prefill likewise. Both rates are measured here, by loops that do nothing else (the "roofline" of
Williams et al., 2009, https://doi.org/10.1145/1498765.1498785).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastinfer import _C, hub
from fastinfer.engine.engine import EngineConfig
from fastinfer.engine.kv_cache_size import available_memory
from fastinfer.models import open_checkpoint
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.kv_cache import num_blocks_for, token_bytes
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.utils.checks import check_int
from fastinfer.utils.machine import machine_facts
from fastinfer.utils.table import format_table
from fastinfer.utils.torch_threads import one_torch_thread
from fastinfer.weights.expert_weights import DenseExperts, ExpertWeights, LutExperts
from fastinfer.weights.weight import DenseWeight, LutWeight, Weight

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
MAX_BATCH = 2**20
BLOCK_INPUTS = 32  # of a packed weight
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
    """Of a model once loaded: bytes in memory, those read in every step, those of all experts, of which a step reads
    some, and operations by the unit that does them.

    ``byte_operations`` and ``float_operations`` are per token in the layers, ``logits`` per sequence and step.
    """

    memory_bytes: int = 0
    step_bytes: int = 0
    expert_bytes: int = 0
    byte_operations: int = 0
    float_operations: int = 0
    logits_byte_operations: int = 0
    logits_float_operations: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Weights":
        """Made by the loader, which this follows in whatever it does: embedding, head and one layer of each layout, one
        at a time. The rotary table is made for one position.

        Raises:
            GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as for loading the model.
        """
        loader = DecoderLoader(checkpoint, Precision.of("auto"), 1, "cpu")
        embedding = cls()._with(loader.embedding())
        lm_head = loader.lm_head()
        head = embedding if lm_head is None else cls()._with(lm_head)
        weights = cls(
            memory_bytes=embedding.memory_bytes + (0 if lm_head is None else head.memory_bytes),
            step_bytes=head.step_bytes,  # of an embedding rows are read, not all
            logits_byte_operations=head.byte_operations,
            logits_float_operations=head.float_operations,
        )
        weights._with(loader.norm())
        if (positions := loader.position_embedding()) is not None:
            weights.memory_bytes += positions.nbytes
        layers: dict[Hashable, Weights] = {}
        tables: dict[int, int] = {}
        for index in range(checkpoint.config.num_layers):
            layout = checkpoint.layout(index), checkpoint.config.window(index)
            if layout not in layers:
                layer = loader.layer(index)
                checkpoint.release()
                layers[layout] = cls()._with(layer)
                table = layer.attention.cos_sin_cache
                tables[table.data_ptr()] = table.nbytes * checkpoint.config.max_position
                del layer
            weights._add(layers[layout])
        weights.memory_bytes += sum(tables.values())
        return weights

    def read_bytes(self, config: ModelConfig, tokens: int) -> float:
        """By a step of so many tokens, whose experts are as good as drawn: all but those that no token chooses."""
        if not config.num_experts:
            return self.step_bytes
        chosen = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
        return self.step_bytes + self.expert_bytes * chosen

    def _add(self, other: "Weights") -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def _with(self, part: Any, share: float = 1.0) -> "Weights":
        """Counts the tensors of nested dataclasses, without the rotary table that layers share; a token's products take
        a ``share`` of them.
        """
        if isinstance(part, Tensor):
            self.memory_bytes += part.nbytes
            self.step_bytes += part.nbytes
        elif isinstance(part, tuple):
            for each in part:
                self._with(each, share)
        elif isinstance(part, MixtureOfExperts):
            self._with((part.norm, part.router))
            experts = Weights()._with((part.gate_up, part.down), part.top_k / part.router.out_features)
            self._add(replace(experts, step_bytes=0, expert_bytes=experts.step_bytes))
        elif is_dataclass(part):
            for field in fields(part):
                if field.name != "cos_sin_cache":
                    self._with(getattr(part, field.name), share)
            if isinstance(part, DenseWeight | DenseExperts):
                self.float_operations += round(2 * part.values.numel() * share)
            elif isinstance(part, Weight | ExpertWeights) and hasattr(part, "qweight"):
                *stacked, _, blocks = part.qweight.shape[:-3]
                operations = round(2 * math.prod(stacked) * part.out_features * blocks * BLOCK_INPUTS * share)
                # Of a table, and of inputs that are not rounded, products are computed in fp32.
                if isinstance(part, LutWeight | LutExperts) or getattr(part, "activation_bits", 8) == 32:
                    self.float_operations += operations
                else:
                    self.byte_operations += operations
        return self


def kv_cache_bytes(config: ModelConfig, num_kv_heads: int, dtype: torch.dtype, context: int, batch: int) -> int:
    """Keys and values of ``batch`` sequences in whole blocks, with their scales where they have some."""
    block_size = EngineConfig().block_size
    slots = batch * num_blocks_for(context, block_size) * block_size
    return slots * token_bytes(config.num_layers, num_kv_heads, config.head_dim, dtype)


def attended_positions(config: ModelConfig, tokens: int) -> int:
    """At how many positions the first so many tokens of a sequence look, in all layers together."""
    windows = [min(config.window(index) or tokens, tokens) for index in range(config.num_layers)]
    return sum(window * (window + 1) // 2 + (tokens - window) * window for window in windows)


def head_layouts(config: ModelConfig) -> dict[str, int]:
    """KV heads by the name of the layout, the model's own first: MHA has one per query head, MQA one in all."""
    own = {config.num_heads: "MHA", 1: "MQA"}.get(config.num_kv_heads, "GQA")
    return {own: config.num_kv_heads} | {"MHA": config.num_heads, "MQA": 1}


def describe(model: str, context: int | None, batch: int, rates: Rates | None = None) -> dict[str, Any]:
    """All figures for JSON, in bytes and seconds. ``rates`` are measured unless given.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as for loading the model.
        RequestError: ``context`` is beyond the model's own limit, or ``batch`` out of range.
    """
    checkpoint = open_checkpoint(hub.resolve(model))
    config = checkpoint.config
    context = config.max_position if context is None else context
    check_int("--context", context, 1, config.max_position)
    check_int("--batch", batch, 1, MAX_BATCH)
    with one_torch_thread():
        weights = Weights.of(checkpoint)
    rates = rates or Rates.measure()
    layouts = head_layouts(config)
    kv_bytes = {
        layout: {_name(dtype): kv_cache_bytes(config, heads, dtype, context, batch) for dtype in KV_DTYPES}
        for layout, heads in layouts.items()
    }
    own = next(iter(layouts))

    def bound(cache_bytes: float, tokens: int, attended: int) -> float:
        """Seconds for so many tokens of each sequence, which look at so many positions in all layers together."""
        attention = 4 * config.num_heads * config.head_dim * attended
        floats = attention + weights.float_operations * tokens + weights.logits_float_operations
        products = weights.byte_operations * tokens + weights.logits_byte_operations
        seconds = batch * (floats / rates.float_operations + products / rates.byte_operations)
        read_bytes = weights.read_bytes(config, batch * tokens) + cache_bytes
        return max(read_bytes / rates.read_bytes, seconds)

    in_prefill = attended_positions(config, context)
    in_step = in_prefill - attended_positions(config, context - 1)
    seen = in_step / (config.num_layers * context)
    steps = {name: bound(seen * size, 1, in_step) for name, size in kv_bytes[own].items()}
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
        "memory_bytes": machine_facts()["cpu"]["memory"],
        "available_bytes": available_memory("cpu"),
        "measured_per_s": vars(rates),
        "threads": _C.get_num_threads(),
        "decode_step_s": steps,
        "prefill_s": bound(0, context, in_prefill),
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
        f"{text}\n\n{format_table(rows)}\n\nBy head layout, in {default}: {', '.join(others)}.\n"
        "Times are lower bounds, from the rates that this CPU had just now; the engine takes longer, see "
        "docs/performance.md.\nActivations and workspaces are not counted."
    )


def _name(dtype: torch.dtype) -> str:
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
