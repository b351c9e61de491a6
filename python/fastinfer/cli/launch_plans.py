"""Launch plans of operators for a GPU, computed without one: ``fastinfer info --plan int4_gemm 1 8192 8192``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastinfer.errors import RequestError


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that launch policies use; ``shared_bytes`` is the largest shared memory of a block."""

    arch: int
    multiprocessors: int
    shared_bytes: int


# One GPU of each architecture: A100, RTX 3090, RTX 4090, H100.
GPUS = {
    80: Gpu(80, 108, 163 * 1024),
    86: Gpu(86, 82, 99 * 1024),
    89: Gpu(89, 128, 99 * 1024),
    90: Gpu(90, 132, 227 * 1024),
}


def choose_gpu(arch: int | None) -> Gpu:
    """Return the GPU of the given architecture, by default the first one that torch sees, or else an H100."""
    if arch is not None:
        if arch not in GPUS:
            raise RequestError(f"--arch must be one of {', '.join(map(str, GPUS))}, got {arch}")
        return GPUS[arch]
    if not torch.cuda.is_available():
        return GPUS[90]
    found = torch.cuda.get_device_properties(0)
    visible = 10 * found.major + found.minor
    known = max((arch for arch in GPUS if arch <= visible), default=80)
    return replace(GPUS[known], arch=visible, multiprocessors=found.multi_processor_count)


def launch_plan(op: str, sizes: dict[str, int], gpu: Gpu) -> dict[str, Any]:
    """Return tiles, splits, workspace and launches of ``op``. Values whose names end in ``_bytes`` are bytes.

    Raises:
        ValueError: the operator has no policy, or a size is missing, unknown or out of range.
    """
    from fastinfer import _C

    return _C.launch_plan(op, sizes, gpu.arch, gpu.multiprocessors, gpu.shared_bytes)


def describe(arguments: Sequence[str], group: int | None, gpu: Gpu) -> dict[str, Any]:
    """Return the plan of an operator whose name and sizes come from the command line.

    Raises:
        RequestError: the operator is unknown, or a size is missing or not valid.
    """
    from fastinfer import _C

    op, *numbers = arguments
    defaults = _C.launch_plan_sizes().get(op)
    if defaults is None:
        raise RequestError(f"--plan knows {', '.join(_C.launch_plan_sizes())}; got {op!r}")
    required = sum(value is None for value in defaults.values())
    if not required <= len(numbers) <= len(defaults):
        names = " ".join(name.upper() if value is None else f"[{name.upper()}]" for name, value in defaults.items())
        raise RequestError(f"--plan {op} takes {names}, got {len(numbers)} sizes")
    sizes: dict[str, int] = {}
    for name, text in zip(defaults, numbers, strict=False):
        if not text.isdecimal() or not text.isascii() or len(text) > 18:
            raise RequestError(f"--plan {op}: {name.upper()} must be a whole number, got {text!r}")
        sizes[name] = int(text)
    if group is not None:
        sizes["group"] = group
    try:
        plan = launch_plan(op, sizes, gpu)
    except (ValueError, RuntimeError) as error:
        raise RequestError(f"--plan {op}: {error}") from None
    shown = {name: sizes.get(name, value) for name, value in defaults.items()}
    return {"op": op, "sizes": shown, "gpu": vars(gpu), "plan": plan}


def table(described: dict[str, Any]) -> str:
    """Write a result of :func:`describe` as text."""
    gpu, plan = described["gpu"], dict(described["plan"])
    rows = {
        described["op"]: ", ".join(f"{name} {value}" for name, value in described["sizes"].items()),
        "gpu": f"sm_{gpu['arch']}, {gpu['multiprocessors']} multiprocessors, {_bytes(gpu['shared_bytes'])} a block",
    }
    launches = plan.pop("launches")
    for name, value in plan.items():
        rows[name.removesuffix("_bytes").replace("_", " ")] = _bytes(value) if name.endswith("_bytes") else str(value)
    for launch in launches:
        words = f"{launch['blocks']} blocks of {launch['threads']} threads, {_bytes(launch['shared_bytes'])} shared"
        rows[f"launch {launch['kernel']}"] = words + (", dependent" if launch["dependent"] else "")
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _bytes(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"
