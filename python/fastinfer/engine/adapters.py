"""Names of the LoRA adapters that requests can ask for, and the slots in which they are."""

import itertools
from pathlib import Path

from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError
from fastinfer.formats.peft import read_adapter
from fastinfer.models.lora import AdapterSlots


class Adapters:
    """Loads and unloads adapters between steps.

    Args:
        slots: of the model, or ``None`` if it has none.
    """

    def __init__(self, slots: AdapterSlots | None = None) -> None:
        self._slots = slots
        self._free = [] if slots is None else list(range(slots.max_loras - 1, -1, -1))
        self._loaded: dict[str, tuple[int, int]] = {}  # name to slot, and number of the load
        self._num_loads = itertools.count()

    @property
    def names(self) -> list[str]:
        return sorted(self._loaded)

    def load(self, name: str, path: str | Path) -> None:
        """Read an adapter and give it a name.

        Raises:
            AdapterError: it cannot be read, or does not fit the model.
            RequestError: the name is taken, or all slots are.
        """
        if name in self._loaded:
            raise RequestError(f"adapter name must be new, got {name!r}")
        if self._slots is None:
            raise RequestError("adapters need max_loras of at least 1, got 0")
        if not self._free:
            raise RequestError(f"max_loras={self._slots.max_loras} adapters are loaded: unload one of {self.names}")
        self._slots.load(self._free[-1], read_adapter(Path(path)))
        self._loaded[name] = self._free.pop(), next(self._num_loads)

    def unload(self, name: str, sequences: list[Sequence]) -> None:
        """Forget an adapter.

        Args:
            name: of the adapter.
            sequences: those that are not finished, or stay in the cache.

        Raises:
            RequestError: there is none of this name, or one of the sequences uses it.
        """
        slot, _ = self._get(name)
        if users := {sequence.request_id for sequence in sequences if sequence.adapter == slot}:
            raise RequestError(
                f"adapter {name!r} must not be in use to be unloaded, got {len(users)} requests or prompt modules"
            )
        assert self._slots is not None
        self._slots.unload(slot)
        del self._loaded[name]
        self._free.append(slot)

    def slot(self, name: str) -> int:
        return self._get(name)[0]

    def cache_key(self, name: str) -> str:
        """Under which prefixes are cached: another one after the name is given to another adapter."""
        return f"{name} {self._get(name)[1]}"

    def _get(self, name: str) -> tuple[int, int]:
        if name not in self._loaded:
            raise RequestError(f"adapter must be one of {self.names}, got {name!r}")
        return self._loaded[name]
