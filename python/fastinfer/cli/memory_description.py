"""All figures of ``fastinfer info --memory``."""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from fastinfer import _C, hub
from fastinfer.cli.added_memory import distillation_memory, draft_memory
from fastinfer.cli.memory_bounds import (
    KV_DTYPES,
    Rates,
    Weights,
    all_state_bytes,
    attended_positions,
    device_memory,
    dtype_name,
    head_layouts,
    kv_cache_bytes,
    module_token_bytes,
    positions_of_last,
    sparse_attention_bytes,
)
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import check_draft_model
from fastinfer.engine.kv_cache_size import available_memory
from fastinfer.errors import RequestError
from fastinfer.models import open_checkpoint, open_mtp_checkpoint
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import token_bytes
from fastinfer.utils.checks import check_int
from fastinfer.utils.machine import machine_facts
from fastinfer.utils.torch_threads import one_torch_thread

MAX_BATCH = 2**20


def describe(
    model: str,
    context: int | None,
    batch: int,
    rates: Rates | None = None,
    device: str | None = None,
    draft_model: str | None = None,
    num_drafts: int = 1,
) -> dict[str, Any]:
    """Compute all figures as JSON values, in bytes and seconds.

    Args:
        model: name or path of the model.
        context: tokens of each sequence; ``None`` for the model's limit.
        batch: number of sequences.
        rates: rates of the CPU; measured if ``None``.
        device: list of places whose memory is described, too; ``None`` for none.
        draft_model: name or path of a draft model or a draft head beside it, ``"mtp"`` for the model's own; ``None``
            for none.
        num_drafts: number of drafts per step, which is the largest number of its own layers that a model drafts with.

    Raises:
        ModelNotFoundError, GGUFFormatError, CheckpointFormatError, UnsupportedModelError: the model cannot be loaded.
        RequestError: the model is a draft head, ``context`` is beyond the model's limit, ``batch`` is out of range, or
            the draft model does not fit the model, see :func:`fastinfer.engine.construction.check_draft_model`.
    """
    checkpoint = open_checkpoint(hub.resolve(model))
    config = checkpoint.config
    if config.is_draft_head:
        raise RequestError(f"--memory: expected a whole model, got the draft head {checkpoint.path}")
    context = config.max_position if context is None else context
    check_int("--context", context, 1, config.max_position)
    check_int("--batch", batch, 1, MAX_BATCH)
    with one_torch_thread():
        weights = Weights.of(checkpoint, context)
    rates = rates or Rates.measure()
    layouts = head_layouts(config)
    kv_dtypes = KV_DTYPES if config.latent_attention is None else KV_DTYPES[:-1]
    # Beside a draft model all layers are in one group, and none drops what is before its window.
    stored = config if draft_model is None else replace(config, windows=())
    speculated = 0 if draft_model is None else num_drafts
    kv_bytes = {
        layout: {
            dtype_name(dtype): kv_cache_bytes(stored, heads, dtype, context, batch, num_drafts=speculated)
            for dtype in kv_dtypes
        }
        for layout, heads in layouts.items()
    }
    own = next(iter(layouts))
    draft = None
    if draft_model is not None:
        if draft_model == hub.MTP:
            source = open_mtp_checkpoint(checkpoint.path, max_layers=num_drafts)
        else:
            source = open_checkpoint(hub.resolve(draft_model))
        check_draft_model(EngineConfig(num_speculative_tokens=num_drafts), config, source.config, context)
        with one_torch_thread():
            draft = draft_memory(source, kv_dtypes, context, batch)

    def total_bytes(name: str, size: int) -> int:
        drafts = 0 if draft is None else draft.weights_bytes + draft.kv_cache_bytes[name]
        return weights.memory_bytes + size + drafts

    def bound(cache_bytes: float, tokens: int, attended: dict[int, Counter[KVShape]], *, is_prompt: bool) -> float:
        """Return the least seconds for ``tokens`` tokens of each sequence with ``attended`` (query, key) pairs each.

        The pairs are those of the layers with each number of query heads.
        """
        attention = sum(
            2 * heads * (shape.head_dim + (shape.value_dim or shape.head_dim)) * n
            for heads, pairs in attended.items()
            for shape, n in pairs.items()
        )
        floats = attention + weights.float_operations * tokens + weights.reading_float_operations
        products = weights.byte_operations * tokens + weights.reading_byte_operations
        float_rate, byte_rate = rates.float_operations, rates.byte_operations
        if is_prompt:  # but not its logits
            float_rate = max(float_rate, rates.float_tile_operations)
            byte_rate = max(byte_rate, rates.byte_tile_operations)
        seconds = floats / float_rate + products / byte_rate
        seconds += weights.logits_float_operations / rates.float_operations
        seconds += weights.logits_byte_operations / rates.byte_operations
        read_bytes = weights.read_bytes(config, batch * tokens) + cache_bytes
        return max(read_bytes / rates.read_bytes, batch * seconds)

    layers, head_counts = range(config.num_layers), sorted({*config.layer_heads} or {config.num_heads})
    in_prefill = {heads: attended_positions(config, context, heads) for heads in head_counts}
    in_step = {heads: positions_of_last(config, context, layers, heads) for heads in head_counts}
    every = sum(in_step.values(), Counter[KVShape]())
    seen = {dtype: sum(count * token_bytes(shape, dtype) for shape, count in every.items()) for dtype in kv_dtypes}
    states = 2 * all_state_bytes(config)  # read and written
    steps = {
        dtype_name(dtype): bound(batch * (size + states), 1, in_step, is_prompt=False) for dtype, size in seen.items()
    }
    return {
        "model": model,
        "architecture": config.architecture,
        "num_layers": config.num_stored_layers,
        **{name: getattr(config, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        "layer_heads": list(config.layer_heads),
        "head_layout": own,
        "context": context,
        "batch": batch,
        "weights_bytes": weights.memory_bytes,
        "kv_cache_bytes": kv_bytes,
        "sparse_attention_bytes": sparse_attention_bytes(config, context, batch),
        "module_token_bytes": module_token_bytes(config, kv_dtypes),
        "draft": None if draft is None else asdict(draft),
        "distillation": distillation_memory(checkpoint, weights),
        "total_bytes": {name: total_bytes(name, size) for name, size in kv_bytes[own].items()},
        "memory_bytes": machine_facts()["cpu"]["memory"],
        "available_bytes": available_memory("cpu"),
        "measured_per_s": vars(rates),
        "devices": [] if device is None else device_memory(checkpoint, device, context, batch),
        "threads": _C.get_num_threads(),
        "decode_step_s": steps,
        "prefill_s": bound(0, context, in_prefill, is_prompt=True),
    }
