"""Text of ``fastinfer info --memory``."""

from typing import Any

from fastinfer.cli.memory_bounds import dtype_name
from fastinfer.models.config import Precision
from fastinfer.utils.table import format_table


def report(found: dict[str, Any]) -> str:
    """Write the figures of :func:`fastinfer.cli.memory_description.describe` as text."""
    rates, batch, context = found["measured_per_s"], found["batch"], found["context"]
    default = dtype_name(Precision.of("auto").kv_cache_dtype)
    sizes = next(iter(found["kv_cache_bytes"].values()))
    rows = [["KV cache", "size", "with weights", "fits", "decode step", "tokens/s"]]
    for name, seconds in found["decode_step_s"].items():
        total = found["total_bytes"][name]
        fits = "yes" if total <= found["available_bytes"] else "no"
        speed = f"{batch / seconds:.0f}" if batch / seconds >= 10 else f"{batch / seconds:.2g}"
        label = name + (" (default)" if name == default else "")
        rows.append([label, _size(sizes[name]), _size(total), fits, _time(seconds), speed])
    queries = f"{min(found['layer_heads'], default='')} to " if found["layer_heads"] else ""
    heads = f"{queries}{found['num_heads']} query and {found['num_kv_heads']} KV heads of {found['head_dim']}"
    others = [
        f"{layout} {_size(by_dtype[default])}{' (this model)' if layout == found['head_layout'] else ''}"
        for layout, by_dtype in found["kv_cache_bytes"].items()
    ]
    tiles = ""
    if rates["float_tile_operations"]:
        tiles = f", in tiles {rates['byte_tile_operations'] / 1e9:.0f} GOP/s and"
        tiles += f" {rates['float_tile_operations'] / 1e9:.0f} GFLOP/s"
    lines = {
        "model": f"{found['model']} ({found['architecture']}), {found['num_layers']} layers, {heads}",
        "weights": f"{_size(found['weights_bytes'])} as packed in memory",
        "memory": f"{_size(found['memory_bytes'])}, {_size(found['available_bytes'])} of it available",
        "measured": f"reads {rates['read_bytes'] / 1e9:.1f} GB/s, byte products {rates['byte_operations'] / 1e9:.0f}"
        f" GOP/s, floating point {rates['float_operations'] / 1e9:.0f} GFLOP/s{tiles}; threads {found['threads']}",
        "sequences": f"{batch} of {context} tokens; prefill {_time(found['prefill_s'])}",
    }
    if found["sparse_attention_bytes"]:
        lines["sparse"] = f"{_size(found['sparse_attention_bytes'])} more in the cache with --sparse-attention"
    if module_bytes := found["module_token_bytes"].get(default):
        thousand = _size(1000 * module_bytes)
        lines["modules"] = f"{thousand} for each 1,000 tokens of prompt modules, once for all prompts that have them"
    if draft := found["draft"]:
        cache = _size(draft["kv_cache_bytes"][default])
        lines["draft"] = f"{_size(draft['weights_bytes'])} of weights and a cache of {cache}, which are in the table"
    if training := found["distillation"]:
        layer, vocabulary = _size(training["layer_bytes"]), _size(training["vocabulary_bytes"])
        lines["distill"] = f"a student takes {vocabulary}, and {layer} for each layer with gradients and optimizer;"
        lines["distill"] += f" records {training['record_bytes']} bytes a token"
    text = "\n".join(f"{name:<10} {value}" for name, value in lines.items())
    if found["devices"]:
        text += f"\n\n{_devices(found['devices'])}"
    return (
        f"{text}\n\n{format_table(rows)}\n\nBy head layout, in {default}: {', '.join(others)}.\n"
        "Times are lower bounds from the rates measured just now; the engine takes longer, see docs/performance.md.\n"
        "Activations and workspaces are not counted."
    )


def _devices(devices: list[dict[str, Any]]) -> str:
    """Write what each device of a list has of the model as a table."""
    rows = [["device", "layers", "experts of", "weights", f"KV cache ({devices[0]['kv_cache_dtype']})", "together"]]
    for part in devices:
        numbers = part["weights_bytes"], part["kv_cache_bytes"], part["weights_bytes"] + part["kv_cache_bytes"]
        counts = (
            f"{part['num_layers']}",
            f"{part['num_layers_of_experts']} layers" if part["num_layers_of_experts"] else "-",
        )
        rows.append([part["device"], *counts, *map(_size, numbers)])
    return format_table(rows)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
