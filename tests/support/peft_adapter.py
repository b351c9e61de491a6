"""Random LoRA adapters, written as PEFT writes them, or for the slots of a model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastinfer.models.config import ModelConfig
from fastinfer.models.lora import AdapterSlots, PreparedAdapter, _Place
from fastinfer.models.lora_modules import module_sizes

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = {name: "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn" for name in MODULES}

Deltas = dict[tuple[int, str], Tensor]


def write_adapter(
    folder: Path,
    config: ModelConfig,
    rank: int = 4,
    modules: tuple[str, ...] = MODULES,
    *,
    seed: int = 0,
    alpha: float = 6,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Deltas:
    """Write an adapter of these modules in all layers, whose change of a weight has about ``size`` times its magnitude.

    Returns:
        What it adds to the weights, fp64, by layer and module: ``alpha / rank`` times B A, or over the rank's root.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    for layer in range(config.num_layers):
        for module in modules:
            features, out = module_sizes(config, layer)[module]
            name = f"base_model.model.model.layers.{layer}.{BLOCKS[module]}.{module}"
            a = torch.randn(rank, features, generator=generator).to(dtype)
            b = (size / scale / (rank * features) ** 0.5 * torch.randn(out, rank, generator=generator)).to(dtype)
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            deltas[layer, module] = scale * b.double() @ a.double()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values | settings))
    return deltas


def adapter_of_all_modules(slots: AdapterSlots, rank: int) -> PreparedAdapter:
    """An update of every module, of every expert by itself."""
    generator = torch.Generator().manual_seed(rank)
    parts = []
    for modules in (*slots.layers, {"lm_head": slots.lm_head}):
        for module in modules.values():
            for index in [()] if module.ranks.dim() == 1 else [(i,) for i in range(module.ranks.shape[1])]:
                a, b = (torch.randn(rank, half.shape[-1], generator=generator) for half in (module.a, module.b))
                parts.append((_Place(module, index), a, b / a.shape[1] ** 0.5))
    return PreparedAdapter(Path("adapter"), str(rank), parts)
