"""LoRA adapters in memory, ready for the operators: a fixed number of slots, so that recorded graphs stay valid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import AdapterError, UnsupportedModelError
from fastinfer.formats.peft import LoraAdapter
from fastinfer.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class ModuleSlots:
    """The adapters' matrices of one linear layer.

    Attributes:
        a: [slots, max_rank, in_features].
        b: [slots, max_rank, out_features]; transposed and scaled.
        ranks: [slots] int32; 0 where the slot has nothing for this layer. What lies beyond is never read.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """One layer's matrices by the module's name, and the slots [tokens] of a step's tokens."""

    modules: dict[str, ModuleSlots]
    adapter_ids: Tensor

    def add(self, name: str, y: Tensor, x: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0) -> None:
        """Add to a module's output ``y``, in place, what the adapters make of its input ``x``."""
        slots = self.modules[name]
        ops.add_lora(y, x, slots.a, slots.b, self.adapter_ids, ranks=slots.ranks, norm_weight=norm_weight, eps=eps)


class AdapterSlots:
    """Room for adapters of a model; a step's tokens name theirs by its slot.

    Nothing moves once it is allocated: a graph that was recorded before an adapter came runs with it afterwards. Rows
    keep the order of the checkpoints from which adapters are trained, as all weights of a
    :class:`fastinfer.models.decoder.Decoder` do.

    Args:
        config: the model's.
        max_loras: slots.
        max_rank: largest rank of an adapter.
        dtype: of the matrices; a step reads those of its adapters.
        device: of the model.

    Attributes:
        layers: per layer the matrices by the module's name.
    """

    def __init__(
        self, config: ModelConfig, max_loras: int, max_rank: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        if config.num_experts or not config.gated:
            raise UnsupportedModelError(
                f"adapters of {config.architecture} are not implemented: only of models with one gated MLP per layer"
            )
        self.max_loras = max_loras
        self.max_rank = max_rank

        def slots(features: int, out: int) -> ModuleSlots:
            # Not initialised: a page costs memory only once it is written.
            a, b = (torch.empty(max_loras, max_rank, size, dtype=dtype, device=device) for size in (features, out))
            return ModuleSlots(a, b, torch.zeros(max_loras, dtype=torch.int32, device=device))

        sizes = module_sizes(config)
        self.layers = tuple({name: slots(*size) for name, size in sizes.items()} for _ in range(config.num_layers))

    def of(self, adapter_ids: Tensor) -> list[LayerAdapters]:
        """The layers of a step whose tokens have these slots."""
        return [LayerAdapters(modules, adapter_ids) for modules in self.layers]

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Put an adapter into a slot, in place of what is there. No step may be running.

        Raises:
            AdapterError: it does not fit the model or the slots, which are then as before.
        """
        self._check(adapter)
        self.unload(slot)
        for (layer, module), low_rank in adapter.layers.items():
            slots = self.layers[layer][module]
            slots.a[slot, : low_rank.rank] = low_rank.a
            slots.b[slot, : low_rank.rank] = low_rank.b.T.float() * low_rank.scale
            slots.ranks[slot] = low_rank.rank

    def unload(self, slot: int) -> None:
        """Empty a slot: tokens that name it are computed without an adapter."""
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot must be in 0..{self.max_loras - 1}, got {slot}")
        for layer in self.layers:
            for slots in layer.values():
                slots.ranks[slot] = 0

    def _check(self, adapter: LoraAdapter) -> None:
        if adapter.max_rank > self.max_rank:
            raise AdapterError(f"{adapter.path}: rank must be at most {self.max_rank}, got {adapter.max_rank}")
        for (layer, module), low_rank in adapter.layers.items():
            if layer >= len(self.layers):
                raise AdapterError(f"{adapter.path}: {low_rank.name}: the model has {len(self.layers)} layers only")
            slots = self.layers[layer][module]
            shapes = (("A", low_rank.a, slots.a.shape[2], 1), ("B", low_rank.b, slots.b.shape[2], 0))
            for half, matrix, features, dim in shapes:
                if matrix.shape[dim] != features:
                    wanted = [features, low_rank.rank] if dim == 0 else [low_rank.rank, features]
                    raise AdapterError(
                        f"{adapter.path}: {low_rank.name}.lora_{half} must have the shape {wanted} for this model, "
                        f"got {list(matrix.shape)}"
                    )


def module_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's projections."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (hidden, q_size),
        "k_proj": (hidden, kv_size),
        "v_proj": (hidden, kv_size),
        "o_proj": (q_size, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
