"""The loaded LoRA adapters: the names by which requests refer to them, and their slots in the model."""

from pathlib import Path

from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError
from fastinfer.formats.peft import LoraAdapter, read_adapter
from fastinfer.models.lora import AdapterSlots


class Adapters:
    """Loads and unloads adapters between steps.

    Args:
        slots: the model's slots for adapters; ``None`` if it has none.
    """

    def __init__(self, slots: AdapterSlots | None = None) -> None:
        self._slots = slots
        self._free = [] if slots is None else list(range(slots.max_loras - 1, -1, -1))
        self._loaded: dict[str, tuple[int, str]] = {}  # name to (slot, digest)

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters, sorted."""
        return sorted(self._loaded)

    def load(self, name: str, adapter: str | Path | LoraAdapter) -> None:
        """Load an adapter into a free slot.

        Args:
            name: name by which requests refer to the adapter.
            adapter: the adapter, or its folder in the format that PEFT saves.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is in use, or no slot is free.
        """
        if name in self._loaded:
            raise RequestError(f"adapter name must be new, got {name!r}")
        if self._slots is None:
            raise RequestError("adapters need max_loras of at least 1, got 0")
        if not self._free:
            raise RequestError(f"max_loras={self._slots.max_loras} adapters are loaded: unload one of {self.names}")
        if not isinstance(adapter, LoraAdapter):
            adapter = read_adapter(Path(adapter))
        self._slots.load(self._free[-1], adapter)
        self._loaded[name] = self._free.pop(), adapter.digest

    def unload(self, name: str, sequences: list[Sequence]) -> None:
        """Unload an adapter and free its slot.

        Args:
            name: name of the adapter.
            sequences: all unfinished sequences and those of prompt modules.

        Raises:
            RequestError: there is no adapter of this name, or one of the sequences uses it.
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
        """Return the slot of an adapter.

        Raises:
            RequestError: there is no adapter of this name.
        """
        return self._get(name)[0]

    def cache_key(self, name: str) -> str:
        """Return the adapter's identity for the prefix cache, which depends on its matrices alone.

        Raises:
            RequestError: there is no adapter of this name.
        """
        return self._get(name)[1]

    def _get(self, name: str) -> tuple[int, str]:
        if name not in self._loaded:
            raise RequestError(f"adapter must be one of {self.names}, got {name!r}")
        return self._loaded[name]
