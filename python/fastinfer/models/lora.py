"""Loaded LoRA adapters, in a fixed number of slots so that recorded graphs stay valid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import AdapterError, UnsupportedModelError
from fastinfer.formats.peft import LoraAdapter
from fastinfer.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class ModuleSlots:
    """Matrices of all adapters for one linear layer.

    Attributes:
        a: [slots, max_rank, in_features].
        b: [slots, max_rank, out_features]; transposed and scaled.
        ranks: [slots] int32; rank of each adapter in this layer, 0 if it does not change the layer. Rows of ``a`` and
            ``b`` past the rank are never read.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """Matrices of one layer by name of the module, and the slot of each token of a step ([tokens])."""

    modules: dict[str, ModuleSlots]
    adapter_ids: Tensor

    def add(self, name: str, y: Tensor, x: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0) -> None:
        """Add the adapters' update for a module's input ``x`` to its output ``y``, in place."""
        slots = self.modules[name]
        ops.add_lora(y, x, slots.a, slots.b, self.adapter_ids, ranks=slots.ranks, norm_weight=norm_weight, eps=eps)


class AdapterSlots:
    """Slots for the adapters of a model; the tokens of a step refer to adapters by slot.

    The tensors never move, so a graph that was recorded before an adapter was loaded also works with it. The rows of
    the matrices have the order of the checkpoint, like all weights of a :class:`fastinfer.models.decoder.Decoder`.

    Args:
        config: configuration of the model.
        max_loras: number of slots.
        max_rank: largest rank of an adapter.
        dtype: dtype of the matrices.
        device: device of the model.

    Attributes:
        layers: for each layer, the matrices by name of the module.
    """

    def __init__(
        self, config: ModelConfig, max_loras: int, max_rank: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        if config.num_experts or not config.gated:
            raise UnsupportedModelError(
                f"adapters for {config.architecture} are not implemented: only for models with one gated MLP per layer"
            )
        self.max_loras = max_loras
        self.max_rank = max_rank

        def slots(features: int, out: int) -> ModuleSlots:
            # Uninitialised: a page takes memory only once it is written.
            a, b = (torch.empty(max_loras, max_rank, size, dtype=dtype, device=device) for size in (features, out))
            return ModuleSlots(a, b, torch.zeros(max_loras, dtype=torch.int32, device=device))

        sizes = module_sizes(config)
        self.layers = tuple({name: slots(*size) for name, size in sizes.items()} for _ in range(config.num_layers))

    def of(self, adapter_ids: Tensor) -> list[LayerAdapters]:
        """Return the adapters of all layers for a step whose tokens have these slots."""
        return [LayerAdapters(modules, adapter_ids) for modules in self.layers]

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Load an adapter into a slot, replacing its contents. No step may be running.

        Raises:
            AdapterError: the adapter does not fit the model or the slots, which then stay unchanged.
        """
        self._check(adapter)
        self.unload(slot)
        for (layer, module), low_rank in adapter.layers.items():
            slots = self.layers[layer][module]
            slots.a[slot, : low_rank.rank] = low_rank.a
            slots.b[slot, : low_rank.rank] = low_rank.b.T.float() * low_rank.scale
            slots.ranks[slot] = low_rank.rank

    def unload(self, slot: int) -> None:
        """Empty a slot; tokens with this slot are then computed without an adapter."""
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
    """Return the numbers of inputs and outputs of a layer's projections, by name."""
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
