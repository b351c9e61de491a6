"""A packed model in memory that several processes read: its tensors, and a description of the objects that hold them.

Only this package's dataclasses are described, as JSON; nothing is pickled. The bytes are the length of the description
in 8 bytes, the description, and the tensors, each of which begins at a multiple of 64 bytes.
"""

import dataclasses
import importlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.models import Model, load_weights
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.fingerprint import fingerprint
from fastinfer.utils.sealed_memory import SealedMemory

ALIGNMENT = 64
LENGTH_BYTES = 8
PLAIN = (bool, int, float, str, type(None))
COLLECTIONS = {"tuple": tuple, "list": list, "frozenset": frozenset}


class SharedWeights:
    """Loads a model whose weights the replicas of a host share: the first one packs them, and all map the same copy.

    It can take the place of :func:`fastinfer.models.load_weights`, on a CPU. A process that writes to the weights is
    ended by the system.

    Args:
        descriptor: descriptor of a :class:`~fastinfer.utils.sealed_memory.SealedMemory` that all replicas have.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = SealedMemory(descriptor)

    def __call__(self, checkpoint: Checkpoint, dtype: str, device: str, max_model_len: int | None) -> Model:
        """Load the model, unless another process has done so, and map it.

        Raises:
            FastinferError: as for :func:`fastinfer.models.load_model`.
            RequestError: the shared model was loaded from other files, or with other options.
        """
        identity = fingerprint([checkpoint], Precision.of(dtype, device), max_model_len)
        with self._memory.lock():
            if not self._memory.is_sealed:
                write_model(load_weights(checkpoint, dtype, device, max_model_len), identity, self._memory)
        model, found = read_model(self._memory)
        if found != identity:
            raise RequestError(
                f"{checkpoint.path}: the files have changed since the first replica loaded them: restart the server"
            )
        return model


def write_model(model: Model, identity: str, memory: SealedMemory) -> None:
    """Move a model into shared memory, which is sealed then. The model itself loses its tensors.

    A tensor's own memory is freed as soon as it is copied, so that there are never two copies of all of them.

    Args:
        model: a model in host memory.
        identity: a text that is kept with the model.
        memory: memory that is not sealed.
    """
    description = _Description()
    root = description.add(model)
    text = json.dumps({"identity": identity, "model": root, **description.contents()}).encode()
    head = (len(text).to_bytes(LENGTH_BYTES, "little") + text).ljust(_aligned(LENGTH_BYTES + len(text)))
    sizes = [_aligned(tensor.nbytes) for tensor in description.tensors]
    with memory.writing(len(head) + sum(sizes)) as pages, torch.no_grad():
        pages.next(len(head))[:] = head
        for tensor, size in zip(description.tensors, sizes, strict=True):
            if size:
                shared = torch.frombuffer(pages.next(size), dtype=torch.uint8)[: tensor.nbytes]
                shared.view(tensor.dtype).view(tensor.shape).copy_(tensor)
                tensor.set_()  # type: ignore[call-overload]  # without arguments, an empty tensor


def read_model(memory: SealedMemory) -> tuple[Model, str]:
    """Make a model on the tensors in shared memory, and return it with the text that was kept with it.

    Args:
        memory: memory that :func:`write_model` has filled.
    """
    view = memory.read()
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    contents = json.loads(bytes(view[LENGTH_BYTES:end]))
    data = torch.frombuffer(view, dtype=torch.uint8)
    tensors, begin = [], _aligned(end)
    for dtype_name, shape in contents["tensors"]:
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        tensors.append(data[begin : begin + num_bytes].view(dtype).view(shape))
        begin += _aligned(num_bytes)
    objects: list[Any] = []
    for name, fields in contents["objects"]:
        values = {key: _decoded(value, tensors, objects) for key, value in fields.items()}
        objects.append(_class(name)(**values))
    model: Model = _decoded(contents["model"], tensors, objects)
    return model, contents["identity"]


class _Description:
    """Description of a model's parts; each tensor and each object once, so that tied weights stay tied.

    Attributes:
        tensors: all tensors.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._objects: list[tuple[str, dict[str, Any]]] = []
        self._numbers: dict[int, dict[str, int]] = {}  # by the identity of a tensor or an object

    def add(self, value: Any) -> Any:
        """Return a value as JSON has it, after everything that it refers to was added."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if type(value) in COLLECTIONS.values():
            return {type(value).__name__: [self.add(item) for item in value]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = self._add_tensor(value) if isinstance(value, Tensor) else self._add_object(value)
        return self._numbers[id(value)]

    def contents(self) -> dict[str, Any]:
        """Return the lists of tensors and objects."""
        tensors = [(_name(tensor.dtype), tensor.shape) for tensor in self.tensors]
        return {"tensors": tensors, "objects": self._objects}

    def _add_tensor(self, tensor: Tensor) -> dict[str, int]:
        if not tensor.is_contiguous():
            raise TypeError(f"the tensors of a shared model must be contiguous, got the strides {tensor.stride()}")
        self.tensors.append(tensor)
        return {"tensor": len(self.tensors) - 1}

    def _add_object(self, value: Any) -> dict[str, int]:
        kind = type(value)
        if not dataclasses.is_dataclass(kind) or not kind.__module__.startswith("fastinfer."):
            raise TypeError(f"a shared model must consist of tensors and dataclasses of fastinfer, got {kind}")
        fields = {field.name: self.add(getattr(value, field.name)) for field in dataclasses.fields(kind)}
        self._objects.append((f"{kind.__module__}:{kind.__name__}", fields))
        return {"object": len(self._objects) - 1}


def _decoded(value: Any, tensors: list[Tensor], objects: list[Any]) -> Any:
    """Return the value for which :meth:`_Description.add` has returned this one."""
    if isinstance(value, PLAIN):
        return value
    [(kind, item)] = value.items()
    if kind == "dtype":
        return getattr(torch, item)
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](_decoded(entry, tensors, objects) for entry in item)
    return tensors[item] if kind == "tensor" else objects[item]


def _class(name: str) -> Any:
    """Return a dataclass of this package by its name."""
    module, _, kind = name.partition(":")
    found = getattr(importlib.import_module(module), kind) if module.startswith("fastinfer.") else None
    if not dataclasses.is_dataclass(found):
        raise TypeError(f"expected a dataclass of fastinfer, got {name}")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
