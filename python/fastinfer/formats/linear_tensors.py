"""Stored tensors of one linear layer, checked when they are read."""

from typing import NoReturn, Protocol

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.unpacked import Dense

DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Group size of the kernels: a multiple of this number of inputs shares a scale.
KERNEL_GROUP = 32


class Tensors(Protocol):
    """Tensors by name, for instance a dictionary."""

    def get(self, name: str, /) -> Tensor | None: ...


class ExpertTensors:
    """Tensors of one expert, whose tensors are stored with those of the others along a first dimension.

    Args:
        tensors: tensors of the whole checkpoint.
        expert: index of the expert.
    """

    def __init__(self, tensors: Tensors, expert: int) -> None:
        self._tensors = tensors
        self._expert = expert

    def get(self, name: str, /) -> Tensor | None:
        """Get the expert's part of a tensor, or None if there is none."""
        values = self._tensors.get(name)
        return values[self._expert] if values is not None and values.dim() and self._expert < len(values) else None


class LinearTensors:
    """Tensors of a layer, named ``module.part``.

    Args:
        tensors: tensors of the whole checkpoint, in host memory.
        module: name of the layer, for instance ``model.layers.0.mlp.down_proj``.
    """

    def __init__(self, tensors: Tensors, module: str) -> None:
        self._tensors = tensors
        self.module = module

    def get(self, part: str) -> Tensor | None:
        """Get a tensor unchecked, or None if it is missing."""
        return self._tensors.get(f"{self.module}.{part}")

    def has(self, part: str) -> bool:
        """Return whether the layer has this tensor."""
        return self.get(part) is not None

    def take(self, part: str, dtypes: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int | None, ...]) -> Tensor:
        """Get a tensor of one of these dtypes and this shape (``None``: any size but 0), made contiguous.

        Raises:
            CheckpointFormatError: the tensor is missing, or its dtype or shape is different.
        """
        tensor = self.get(part)
        if tensor is None:
            raise CheckpointFormatError(f"tensor '{self.module}.{part}' is missing")
        allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in allowed:
            names = " or ".join(_name(dtype) for dtype in allowed)
            self.fail(part, f"expected {names}, got {_name(tensor.dtype)}")
        sizes = tuple(tensor.shape)
        if len(sizes) != len(shape) or any(a == 0 or b not in (None, a) for a, b in zip(sizes, shape, strict=True)):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            self.fail(part, f"expected the shape [{expected}], got {list(sizes)}")
        return tensor.contiguous()

    def take_number(self, part: str, dtypes: torch.dtype | tuple[torch.dtype, ...]) -> Tensor:
        """Get a tensor of one number, with any number of dimensions; errors are those of :meth:`take`."""
        tensor = self.get(part)
        return self.take(part, dtypes, (1,) * (1 if tensor is None else tensor.dim())).view(())

    def dense(self) -> Dense:
        """Get the weight of a layer that is not quantised.

        Raises:
            CheckpointFormatError: the weight is missing, is not a matrix, or has no float dtype.
        """
        return Dense(self.take("weight", DENSE_DTYPES, (None, None)))

    def group_size(self, group_size: int, in_features: int) -> int:
        """Return the number of inputs per scale, with -1 resolved to all inputs.

        Raises:
            UnsupportedModelError: the kernels do not support this group size.
        """
        size = in_features if group_size == -1 else group_size
        if size <= 0 or size % KERNEL_GROUP or in_features % size:
            raise UnsupportedModelError(
                f"layer '{self.module}' has groups of {size} in {in_features} inputs; "
                f"the kernels need a multiple of {KERNEL_GROUP} that divides the inputs"
            )
        return size

    def group_order(self, part: str, group_size: int, in_features: int) -> Tensor | None:
        """Compute the permutation that makes the inputs of each group adjacent, from a tensor of each input's group.

        Returns:
            [in_features] int64, the input at each place; inputs of a group keep their order. ``None`` if the groups are
            in order already.

        Raises:
            CheckpointFormatError: the tensor is missing, or the groups do not all have ``group_size`` inputs.
        """
        groups = self.take(part, (torch.int32, torch.int64), (in_features,)).long()
        if torch.equal(groups, torch.arange(in_features) // group_size):
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], torch.arange(in_features) // group_size):
            self.fail(part, f"expected {in_features // group_size} groups of {group_size} inputs each")
        return order

    def fail(self, part: str, problem: str) -> NoReturn:
        """Raise a CheckpointFormatError that names the tensor."""
        raise CheckpointFormatError(f"tensor '{self.module}.{part}': {problem}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
