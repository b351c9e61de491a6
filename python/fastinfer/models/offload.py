"""Moving a model's tensors out of the device's memory and back, in place."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model, or of anything else that is made of this package's objects, once each."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        item = rest.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)
        elif type(item).__module__.startswith("fastinfer."):
            rest.extend(getattr(item, "__dict__", {}).values())


class HostCopy:
    """The contents of tensors in host memory, while their own memory on the device is free.

    The tensors stay what they are, so that everything that refers to them is valid after :meth:`restore`. Recorded
    graphs are not: their addresses change. The host memory is not pinned, because the system could then not move it
    elsewhere, and torch would keep it for later.

    Args:
        tensors: tensors whose memory can be resized, as that of a GPU can; views may share it.
    """

    @torch.inference_mode()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._copies = [(storage, _bytes(storage).to("cpu", copy=True)) for storage in storages.values()]
        for storage, _ in self._copies:
            storage.resize_(0)

    @torch.inference_mode()
    def restore(self) -> None:
        """Give the tensors their memory and their contents back.

        Raises:
            OutOfMemoryError: the device has too little memory; the tensors stay without any.
        """
        try:
            for storage, copy in self._copies:
                storage.resize_(len(copy))
        except BaseException:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise
        for storage, copy in self._copies:
            _bytes(storage).copy_(copy)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
