"""The registered LoRA adapters: the names by which requests refer to them, and which of them are loaded."""

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from fastinfer.errors import AdapterError, RequestError
from fastinfer.formats.peft import read_adapter
from fastinfer.models.lora import AdapterSlots, PreparedAdapter
from fastinfer.utils.checks import check_path, check_text
from fastinfer.utils.forks import renew_in_children

# Adapters that are read from files at the same time, so that a slow file system delays only some.
MAX_READS = 4


@dataclass(eq=False)
class _Registration:
    """An adapter that requests may name.

    Attributes:
        name: name by which requests refer to it.
        path: its folder.
        key: its identity, which no other registration has, not even one of the same name.
        files: sizes and times of its files when they were first read; ``None`` before.
        digest: hash of its updates; empty before it was read.
    """

    name: str
    path: Path
    key: str
    files: tuple[tuple[int, int], ...] | None = None
    digest: str = ""


class Adapters:
    """Keeps adapters in the model's slots and in host memory, the most recently used ones if there are too many.

    A request's adapter must be in a slot. Adapters are read in threads of their own, and copied into a slot between two
    steps. Methods other than :meth:`read` must be called by the engine's thread.

    Args:
        slots: the model's slots for adapters; ``None`` if it has none.
        max_cpu_loras: maximum number of adapters in host memory, at least 1; adapters in a slot need not be there.

    Attributes:
        slots: see above.
        num_loads: number of times that an adapter was copied into a slot.
    """

    def __init__(self, slots: AdapterSlots | None = None, max_cpu_loras: int = 1) -> None:
        self.slots = slots
        self._max_cpu_loras = max_cpu_loras
        self._registered: dict[str, _Registration] = {}  # by name
        self._by_key: dict[str, _Registration] = {}
        # By key, the least recently used ones first.
        self._in_slot: OrderedDict[str, int] = OrderedDict()
        self._in_memory: OrderedDict[str, PreparedAdapter] = OrderedDict()
        self._reads: dict[str, Future[PreparedAdapter]] = {}
        self._numbers = itertools.count()
        self.num_loads = 0
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Forget the reads of the parent's threads, which the child does not have: what is needed is read again."""
        self._reads.clear()

    @property
    def names(self) -> list[str]:
        """Names of the registered adapters, sorted."""
        return sorted(self._registered)

    def register(self, name: str, path: str | Path) -> None:
        """Register an adapter, which is read when a request needs it.

        Args:
            name: name by which requests refer to the adapter.
            path: its folder in the format that PEFT saves.

        Raises:
            RequestError: the name is in use, or the engine has no slots for adapters.
        """
        self._check_name(name)
        check_path("adapter", path)
        self._add(name, Path(path))

    def read(self, path: str | Path) -> PreparedAdapter:
        """Read an adapter, in any thread.

        Args:
            path: its folder in the format that PEFT saves.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the engine has no slots for adapters.
        """
        if self.slots is None:
            raise RequestError("adapters need max_loras of at least 1, got 0")
        check_path("adapter", path)
        return self.slots.prepare(read_adapter(Path(path)))

    def load(self, name: str, adapter: str | Path | PreparedAdapter, used_keys: Iterable[str] | None = None) -> None:
        """Register an adapter and keep it in host memory.

        Args:
            name: name by which requests refer to the adapter.
            adapter: the adapter, or its folder in the format that PEFT saves.
            used_keys: the adapters in use, as for :meth:`unload`, so that an adapter of this name is replaced; ``None``
                if the name must be new. After an error the old adapter is still there.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is in use, or, with ``used_keys``, the adapter of this name is; the engine has no
                slots for adapters, or an argument is of a wrong type.
        """
        check_text("adapter name", name)
        if used_keys is None or name not in self._registered:
            used_keys = None
            self._check_name(name)
        if not isinstance(adapter, PreparedAdapter):
            adapter = self.read(adapter)
        files = _files(adapter.path)
        if used_keys is not None:
            self.unload(name, used_keys)
        registration = self._add(name, adapter.path)
        registration.files, registration.digest = files, adapter.digest
        self._keep(registration.key, adapter, ())

    def unload(self, name: str, used_keys: Iterable[str]) -> None:
        """Forget an adapter, and free its slot.

        Args:
            name: name of the adapter.
            used_keys: the adapters of all unfinished requests and of pinned prompts, one for each.

        Raises:
            RequestError: there is no adapter of this name, or it is used.
        """
        key = self.key(name)
        if count := sum(used == key for used in used_keys):
            raise RequestError(
                f"adapter {name!r} must not be in use to be unloaded, got {count} requests or pinned prompts"
            )
        del self._registered[name]
        for table in (self._in_slot, self._in_memory, self._reads, self._by_key):
            table.pop(key, None)

    def key(self, name: str) -> str:
        """Return an adapter's identity, which changes when the name is given to another adapter.

        Raises:
            RequestError: there is no adapter of this name.
        """
        check_text("adapter", name)
        if name not in self._registered:
            raise RequestError(f"adapter must be one of {self.names}, got {name!r}")
        return self._registered[name].key

    def slot(self, key: str) -> int | None:
        """Return the slot of an adapter, and count that as a use; ``None`` if it is in none."""
        if key in self._in_slot:
            self._in_slot.move_to_end(key)
        return self._in_slot.get(key)

    def name(self, key: str) -> str:
        """Return the name of the adapter with a key; "" if it is not registered any more, or the key is empty."""
        registration = self._by_key.get(key)
        return "" if registration is None else registration.name

    def digest_of(self, name: str) -> str:
        """Return the digest of a registered adapter, "" if there is none of this name; may be called in any thread."""
        registration = self._registered.get(name)
        return "" if registration is None else registration.digest

    def digest(self, key: str) -> str:
        """Return the hash of the updates of an adapter that was read: equal for adapters that compute the same."""
        return self._by_key[key].digest

    def is_in_memory(self, key: str) -> bool:
        """Whether an adapter is in host memory, so that it can be copied into a slot."""
        return key in self._in_memory

    def fetch(self, keys: list[str]) -> dict[str, Exception]:
        """Begin to read adapters, and take what has been read since the last call.

        Args:
            keys: the adapters that are needed next, those needed first at the front. Those that are in a slot or in
                host memory already are not read, and there are never more in host memory than allowed.

        Returns:
            Errors of adapters that could not be read. They are forgotten: the next call tries again.
        """
        needed = [key for key in dict.fromkeys(keys) if key not in self._in_slot][: self._max_cpu_loras]
        errors: dict[str, Exception] = {}
        for key in [key for key, read in self._reads.items() if read.done()]:
            try:
                prepared = self._reads[key].result()
            except Exception as error:
                errors[key] = error
            else:
                self._keep(key, prepared, needed)
            del self._reads[key]
        for key in needed:
            if key not in self._in_memory and key not in self._reads and key not in errors:
                if len(self._reads) == MAX_READS:
                    break
                self._reads[key] = self._start_reading(self._by_key[key])
        return errors

    @property
    def reads(self) -> list[Future[PreparedAdapter]]:
        """The adapters that are being read."""
        return list(self._reads.values())

    def place(self, key: str, slots_in_use: set[int]) -> int | None:
        """Copy an adapter from host memory into a slot that is free, or else that of the least recently used adapter.

        Args:
            key: the adapter, which is in host memory and in no slot.
            slots_in_use: the slots of running requests, which are not replaced.

        Returns:
            The slot; ``None`` if all are in use.
        """
        assert self.slots is not None
        free = set(range(self.slots.max_loras)).difference(self._in_slot.values())
        if free:
            slot = min(free)
        else:
            unused = [key for key, slot in self._in_slot.items() if slot not in slots_in_use]
            if not unused:
                return None
            slot = self._in_slot.pop(unused[0])
        self.slots.load(slot, self._in_memory[key])
        self._in_memory.move_to_end(key)
        self._in_slot[key] = slot
        self.num_loads += 1
        return slot

    def _check_name(self, name: str) -> None:
        check_text("adapter name", name)
        if name in self._registered:
            raise RequestError(f"adapter name must be new, got {name!r}")
        if self.slots is None:
            raise RequestError("adapters need max_loras of at least 1, got 0")

    def _add(self, name: str, path: Path) -> _Registration:
        registration = _Registration(name, path, f"{name} {next(self._numbers)}")
        self._by_key[registration.key] = registration
        self._registered[name] = registration
        return registration

    def _keep(self, key: str, prepared: PreparedAdapter, needed: Iterable[str]) -> None:
        """Keep an adapter in host memory, instead of the least recently used ones if there are too many.

        Args:
            key: the adapter.
            prepared: its matrices.
            needed: adapters that stay.
        """
        while len(self._in_memory) >= self._max_cpu_loras:
            unneeded = [other for other in self._in_memory if other not in needed]
            if not unneeded:
                return  # nobody waits for this one any more
            del self._in_memory[unneeded[0]]
        self._in_memory[key] = prepared

    def _start_reading(self, registration: _Registration) -> "Future[PreparedAdapter]":
        """Read an adapter in a thread of its own."""
        future: Future[PreparedAdapter] = Future()

        def run() -> None:
            try:
                future.set_result(self._read(registration))
            except BaseException as error:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))

        threading.Thread(target=run, daemon=True, name="fastinfer-adapter").start()
        return future

    def _read(self, registration: _Registration) -> PreparedAdapter:
        """Read an adapter, and check that it is what it was when it was first read."""
        prepared = self.read(registration.path)
        files = _files(registration.path)
        if registration.files not in (None, files):
            raise AdapterError(
                f"{registration.path}: the files of adapter {registration.name!r} must not change while it is "
                "registered: unload it and load it again"
            )
        registration.files, registration.digest = files, prepared.digest
        return prepared


def _files(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return sizes and times of an adapter's files.

    Raises:
        AdapterError: a file has gone.
    """
    paths = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
    try:
        return tuple((stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, paths))
    except OSError as error:
        raise AdapterError(f"{error.filename} must stay as long as the adapter: {error.strerror}") from None
