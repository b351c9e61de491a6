"""Loaded LoRA adapters, in a fixed number of slots so that recorded graphs stay valid."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import AdapterError
from fastinfer.formats.peft import LoraAdapter, LowRank
from fastinfer.models.checkpoint import MLP_PARTS
from fastinfer.models.config import LatentAttentionConfig, ModelConfig
from fastinfer.models.layer_places import LayerPlace
from fastinfer.models.lora_modules import Sizes, module_parts, module_sizes
from fastinfer.models.state_config import Mamba2Config


@dataclass(frozen=True, eq=False)
class ModuleSlots:
    """Matrices of all adapters for one linear layer, or for the same layer of all experts or heads.

    Attributes:
        a: [slots, max_rank, in_features], or [slots, experts, max_rank, in_features].
        b: the same of out_features; transposed and scaled.
        ranks: [slots] or [slots, experts] int32; rank of each adapter in this layer, 0 if it does not change the layer.
            Rows of ``a`` and ``b`` past the rank are never read.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor

    def add(
        self,
        y: Tensor,
        x: Tensor,
        adapter_ids: Tensor,
        expert_ids: Tensor | None = None,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Add the adapters' updates, see :func:`fastinfer.ops.add_lora`."""
        ops.add_lora(
            y,
            x,
            self.a,
            self.b,
            adapter_ids,
            expert_ids=expert_ids,
            ranks=self.ranks,
            norm_weight=norm_weight,
            eps=eps,
        )


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """Matrices of one layer by name of the module, and the slot of each token of a step ([tokens])."""

    modules: dict[str, ModuleSlots]
    adapter_ids: Tensor

    def add(
        self,
        name: str,
        y: Tensor,
        x: Tensor,
        expert_ids: Tensor | None = None,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Add the adapters' update for a module's input ``x`` to its output ``y``, in place.

        Args:
            name: name of the module.
            y, x, expert_ids, norm_weight, eps: see :func:`fastinfer.ops.add_lora`.
        """
        self.modules[name].add(y, x, self.adapter_ids, expert_ids, norm_weight=norm_weight, eps=eps)


@dataclass(frozen=True, eq=False)
class _Place:
    """Place of a part of an update.

    Attributes:
        slots: matrices of the module.
        index: index in ``slots.ranks`` after the slot: the expert or head, if there are any.
        rows: rows of the update's B that belong to the module.
        is_transposed: whether the module is the transpose of these rows.
        factor: factor of the module's weight, which the update gets, too.
    """

    slots: ModuleSlots
    index: tuple[int, ...] = ()
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    is_transposed: bool = False
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs of these rows."""
        out, features = self.slots.b.shape[-1], self.slots.a.shape[-1]
        if isinstance(self.rows, Tensor):  # some of which the module may have several times
            out = len(self.rows.unique())
        return (features, out) if self.is_transposed else (out, features)


@dataclass(frozen=True, eq=False)
class PreparedAdapter:
    """An adapter in the form in which the slots of one model hold it.

    Attributes:
        path: folder that the adapter was read from.
        digest: hash of its updates, see :attr:`fastinfer.formats.peft.LoraAdapter.digest`.
        parts: for each weight: where it is stored, A [rank, in_features], and B [rank, out_features], scaled.
    """

    path: Path
    digest: str
    parts: list[tuple[_Place, Tensor, Tensor]]


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
        places: places of all layers of a model that is on several devices, of which ``device`` is the first.

    Attributes:
        layers: for each layer, the matrices by name of the module; those of experts are ``experts.gate_proj`` and so
            on, those of heads ``heads.keys`` and ``heads.values``.
        lm_head: the matrices of the output layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: str = "cpu",
        places: Sequence[LayerPlace] = (),
    ) -> None:
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._config = config
        self._dtype = dtype
        self._device = torch.device(device)
        whole = LayerPlace(range(config.num_layers), device)
        self.layers = tuple(
            {name: self._empty(name, *size, _device(place, name)) for name, size in self._sizes(layer).items()}
            for place in places or (whole,)
            for layer in place.layers
        )
        self.lm_head = self._empty("lm_head", config.hidden_size, config.vocab_size, device)

    def of(self, adapter_ids: Tensor) -> list[LayerAdapters]:
        """Return the adapters of all layers for a step whose tokens have these slots."""
        return [LayerAdapters(modules, adapter_ids) for modules in self.layers]

    def prepare(self, adapter: LoraAdapter) -> PreparedAdapter:
        """Check that an adapter fits the model, and bring it into the form of the slots; in any thread.

        Raises:
            AdapterError: the adapter does not fit the model or the slots.
        """
        self._check(adapter)
        parts: list[tuple[_Place, Tensor, Tensor]] = []
        for weight, low_rank in adapter.weights.items():
            a = self._host(low_rank.a)
            for place in self._places(weight):
                b = self._host(low_rank.b[place.rows].T.float() * (low_rank.scale * place.factor))
                parts.append((place, b, a) if place.is_transposed else (place, a, b))
        return PreparedAdapter(adapter.path, adapter.digest, parts)

    def load(self, slot: int, adapter: PreparedAdapter) -> None:
        """Load an adapter into a slot, replacing its contents. No step that uses the slot may be running."""
        self.unload(slot)
        for place, a, b in adapter.parts:
            index = (slot, *place.index)
            place.slots.a[index][: len(a)].copy_(a, non_blocking=True)
            place.slots.b[index][: len(b)].copy_(b, non_blocking=True)
            place.slots.ranks[index] = len(a)

    def unload(self, slot: int) -> None:
        """Empty a slot; tokens with this slot are then computed without an adapter."""
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot must be in 0..{self.max_loras - 1}, got {slot}")
        for modules in (*self.layers, {"lm_head": self.lm_head}):
            for slots in modules.values():
                slots.ranks[slot] = 0

    def _sizes(self, layer: int) -> Sizes:
        """Return the numbers of inputs and outputs of a layer's modules, by name."""
        return module_sizes(self._config, layer)

    def _empty(self, name: str, features: int, out: int, device: str) -> ModuleSlots:
        """Allocate the matrices of a module, uninitialised: a page takes memory only once it is written."""
        config, sizes = self._config, (features, out)
        count = {"experts": config.num_experts, "heads": config.num_heads}.get(name.partition(".")[0])
        shape = (self.max_loras,) if count is None else (self.max_loras, count)
        a, b = (torch.empty(*shape, self.max_rank, size, dtype=self._dtype, device=device) for size in sizes)
        return ModuleSlots(a, b, torch.zeros(shape, dtype=torch.int32, device=device))

    def _host(self, matrix: Tensor) -> Tensor:
        """Copy a matrix into host memory of its own, in the dtype of the slots; pinned for a GPU."""
        copy = matrix.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return copy.pin_memory() if self._device.type == "cuda" else copy

    def _check(self, adapter: LoraAdapter) -> None:
        """Check that an adapter fits the model and the slots."""
        if adapter.max_rank > self.max_rank:
            raise AdapterError(f"{adapter.path}: rank must be at most {self.max_rank}, got {adapter.max_rank}")
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for weight, low_rank in adapter.weights.items():
            try:
                places = self._places(weight)
            except KeyError as error:
                raise AdapterError(f"{adapter.path}: {low_rank.name}: {error.args[0]}") from None
            _check_shapes(adapter, low_rank, places)
            for place in places:
                other = seen.setdefault((id(place.slots), place.index), low_rank.name)
                if other != low_rank.name:
                    raise AdapterError(f"{adapter.path}: {low_rank.name} and {other} are the same weight of the model")

    def _places(self, weight: str) -> list[_Place]:
        """Return where the parts of an update are stored.

        Args:
            weight: the project's name of the updated weight.

        Raises:
            KeyError: the model has no such weight; the argument says why.
        """
        if weight == "lm_head":
            return [_Place(self.lm_head)]
        match = re.fullmatch(r"layers\.(\d+)\.(?:experts\.(\d+)\.|(shared_expert)\.)?(\w+)", weight)
        assert match is not None, weight
        stored, expert, shared, module = int(match[1]), match[2], match[3], match[4]
        layer = self._layer(stored, "experts" if expert else shared or module)
        if expert is not None and int(expert) >= self._config.num_experts:
            raise KeyError(f"the model has {self._config.num_experts} experts only")
        if isinstance(self._config.states, Mamba2Config) and not self._config.num_experts:
            shared = None  # the MLP of Granite 4 without experts
        index = () if expert is None else (int(expert),)
        prefix = "shared_expert." if shared else "" if expert is None else "experts."
        modules = self.layers[layer]
        if module == "kv_b_proj" and self._config.latent_attention is not None:
            return self._head_places(modules, self._config.latent_attention)
        inner = self._config.shared_intermediate_size if shared else None
        parts = module_parts(self._config, layer, module, inner)
        if missing := [part for part in parts if prefix + part not in modules]:
            raise KeyError(f"a layer of the model has no {prefix}{missing[0]}, only {', '.join(modules)}")
        states = self._config.states
        factors = {"in_proj_dt": states.dt_scale} if isinstance(states, Mamba2Config) else {}
        return [
            _Place(modules[prefix + part], index, rows, factor=factors.get(part, 1.0)) for part, rows in parts.items()
        ]

    def _head_places(self, modules: dict[str, ModuleSlots], sizes: LatentAttentionConfig) -> list[_Place]:
        """Return where an update of the keys and values of latent attention is stored: those of each head by itself."""
        places = []
        for head in range(self._config.num_heads):
            first = head * (sizes.plain_dim + sizes.value_dim)
            middle = first + sizes.plain_dim
            places.append(_Place(modules["heads.keys"], (head,), slice(first, middle), is_transposed=True))
            places.append(_Place(modules["heads.values"], (head,), slice(middle, middle + sizes.value_dim)))
        return places

    def _layer(self, stored: int, part: str) -> int:
        """Return the index of the layer that has a part, given the number of the file's layer that has it."""
        if not self._config.stored_layers:
            if stored >= len(self.layers):
                raise KeyError(f"the model has {len(self.layers)} layers only")
            return stored
        found = [n for n, pair in enumerate(self._config.stored_layers) if pair[part in MLP_PARTS] == stored]
        if len(found) > 1:  # Mamba-2 and attention
            found = [n for n in found if self._config.has_state(n) == (part in ("in_proj", "out_proj"))]
        if not found:
            raise KeyError(f"the model has no {part} in a layer {stored}")
        return found[0]


def _device(place: LayerPlace, module: str) -> str:
    """Return the device that computes a module of a layer in a place."""
    return place.experts if place.experts is not None and module.startswith("experts.") else place.device


def _check_shapes(adapter: LoraAdapter, low_rank: LowRank, places: list[_Place]) -> None:
    """Check the shapes of an update against those of all weights that it belongs to."""
    features, out = places[0].shape[1], sum(place.shape[0] for place in places)
    for half, matrix, size, dim in (("A", low_rank.a, features, 1), ("B", low_rank.b, out, 0)):
        if matrix.shape[dim] != size:
            wanted = [size, low_rank.rank] if dim == 0 else [low_rank.rank, size]
            raise AdapterError(
                f"{adapter.path}: {low_rank.name}.lora_{half} must have the shape {wanted} for this model, "
                f"got {list(matrix.shape)}"
            )
