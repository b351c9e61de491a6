"""Products with 4-bit weights by kernels of other projects, those of them that are installed."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

# From a symmetric weight, 4-bit integers [n, k] in uint8 (8 means 0) and scales [n, k / group], to a layer for bf16.
Make = Callable[[torch.Tensor, torch.Tensor], torch.nn.Module]


def gemlite(q: torch.Tensor, scales: torch.Tensor) -> torch.nn.Module:
    from gemlite import DType, GemLiteLinear

    (n, k), group = q.shape, q.shape[1] // scales.shape[1]
    types = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
    layer: Any = GemLiteLinear(4, group_size=group, in_features=k, out_features=n, **types)
    layer.pack(q, scales.bfloat16(), 8)
    return layer  # type: ignore[no-any-return]


def humming(q: torch.Tensor, scales: torch.Tensor) -> torch.nn.Module:
    """Humming quantises the weight itself, with scales of its own: the time does not depend on them."""
    from humming.layer import HummingLayer

    (n, k), group = q.shape, q.shape[1] // scales.shape[1]
    weight = (q.float() - 8).view(n, -1, group) * scales.float()[..., None]
    config = {"dtype": "int4", "group_size": group}
    layer: Any = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).to(q.device)
    layer.load_from_unquantized(weight.view(n, k).bfloat16())
    layer.transform()
    return layer  # type: ignore[no-any-return]


# Name in tables: package, and what makes a layer.
PEERS: dict[str, tuple[str, Make]] = {
    "GemLite": ("gemlite", gemlite),
    "Humming": ("humming", humming),
}


def int4_peers() -> dict[str, Make]:
    """The installed peers."""
    return {name: make for name, (package, make) in PEERS.items() if find_spec(package) is not None}
