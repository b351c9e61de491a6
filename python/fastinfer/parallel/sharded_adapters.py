"""LoRA adapters of a model that is divided among ranks."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.peft import LoraAdapter
from fastinfer.models.lora import AdapterSlots, ModuleSlots, PreparedAdapter
from fastinfer.models.lora_modules import Sizes, module_sizes
from fastinfer.parallel.division import Division
from fastinfer.parallel.group import Group
from fastinfer.parallel.matrix_rows import OUTPUTS, adapter_rows
from fastinfer.parallel.messages import Message
from fastinfer.utils.interrupts import deferred_interrupts


class SlotSizes(NamedTuple):
    """Sizes of the slots, see :class:`fastinfer.models.lora.AdapterSlots`."""

    max_loras: int
    max_rank: int
    dtype: torch.dtype


class ShardedAdapterSlots(AdapterSlots):
    """Slots of one rank: A of every module of its layers, and the rows of B whose outputs the rank computes.

    Rank 0 reads adapters, and sends them to the others as activations are exchanged, by a message for each module. The
    slots for layers of other stages take no memory, as nothing is written to them.

    Args:
        division: division of the model among the ranks of a team.
        group: the group of all ranks.
        layers: the rank's layers.
        max_loras, max_rank, dtype: see :class:`fastinfer.models.lora.AdapterSlots`.

    Attributes:
        send: function that sends a message, which rank 0 also gets by :meth:`follow`.
    """

    def __init__(
        self, division: Division, group: Group, layers: range, max_loras: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        self._division = division
        self._group = group
        num_layers = division.config.num_layers
        self._own = {*layers, *([num_layers] if layers.stop == num_layers else [])}  # with the output layer
        self.send: Callable[[list[int]], None] = group.send
        self._outgoing: deque[tuple[Tensor, Tensor]] = deque()  # of messages of rank 0 that it has not followed yet
        # Without memory: what adapters are checked against.
        self._whole = AdapterSlots(division.config, max_loras, max_rank, dtype, "meta")
        super().__init__(division.local_config, max_loras, max_rank, dtype)

    def prepare(self, adapter: LoraAdapter) -> PreparedAdapter:
        return self._whole.prepare(adapter)

    def load(self, slot: int, adapter: PreparedAdapter) -> None:
        """Load an adapter into a slot of all ranks; only for rank 0."""
        addresses = {
            id(slots): (layer, number)
            for layer, modules in enumerate((*self._whole.layers, {"lm_head": self._whole.lm_head}))
            for number, slots in enumerate(modules.values())
        }
        self.send([Message.ADAPTER, slot])
        for place, a, b in adapter.parts:
            with deferred_interrupts():  # matrices without their message would be taken for those of the next one
                self._outgoing.append((a, b))
                self.send([Message.ADAPTER, slot, *addresses[id(place.slots)], len(a), *place.index])

    def follow(self, words: list[int]) -> None:
        """Carry out a message of rank 0, at the same time as all other ranks."""
        if len(words) == 1:
            self.unload(words[0])
            return
        if self._group.rank == 0:
            a, b = self._outgoing.popleft()
        else:
            _, layer, number, rank, *_ = words
            slots = self._modules(self._whole, layer)[number][1]
            a, b = (torch.empty(rank, half.shape[-1], dtype=half.dtype) for half in (slots.a, slots.b))
        self._set(words, a, b)

    def _set(self, words: list[int], a: Tensor, b: Tensor) -> None:
        """Receive what rank 0 has of an adapter for one module, and keep this rank's part."""
        slot, layer, number, rank, *index = words
        name, slots = self._modules(self, layer)[number]
        a, b = self._from_first(a), self._from_first(b)
        if layer not in self._own:
            return
        if name.startswith("heads."):  # of latent attention
            heads = self._division.query_heads(layer)[self._division.rank]
            if index[0] not in heads:
                return
            index = [index[0] - heads.start]
        rows = adapter_rows(self._division, layer, name)
        place = (slot, *index)
        slots.a[place][:rank] = a
        slots.b[place][:rank] = b if rows is None else b[:, rows]
        slots.ranks[place] = rank

    def _from_first(self, x: Tensor) -> Tensor:
        """Return the matrix that rank 0 has."""
        start = int(self._group.rank > 0)
        ids = torch.zeros(len(x), dtype=torch.int64)
        return ops.all_gather_rows(x, ids, self._group.memory, self._group.rank, start, start + 1)

    def _modules(self, slots: AdapterSlots, layer: int) -> list[tuple[str, ModuleSlots]]:
        """Return the modules of a layer by name; the output layer stands behind the others."""
        return list((*slots.layers, {"lm_head": slots.lm_head})[layer].items())

    def _sizes(self, layer: int) -> Sizes:
        """Return the sizes of the rank's modules: with all inputs, and all outputs of output projections."""
        local, whole = super()._sizes(layer), module_sizes(self._division.config, layer)
        return {
            name: (whole[name][0], whole[name][1] if name.rpartition(".")[2] in OUTPUTS else out)
            for name, (_, out) in local.items()
        }
