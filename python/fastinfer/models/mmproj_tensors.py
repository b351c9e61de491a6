"""Tensors of an image encoder in a GGUF file, loaded into modules of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.gguf_unpack import unpack


class MmprojTensors:
    """Reads tensors of an open file.

    Args:
        file: the open file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._read: set[str] = set()
        self.name = file.path.name

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, in the order of PyTorch.

        Raises:
            CheckpointFormatError: the tensor is missing.
        """
        if name not in self._file.tensors:
            raise CheckpointFormatError(f"{self.name}: tensor {name!r} is missing")
        return self._file.tensors[name].shape

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Check the shape of a tensor, from which the sizes in the metadata follow.

        Otherwise wrong metadata could ask for any amount of memory.

        Raises:
            CheckpointFormatError: the tensor is missing or has another shape.
        """
        if (shape := self.shape(name)) != expected:
            raise CheckpointFormatError(
                f"{self.name}: tensor {name!r} must have the shape {list(expected)}, got {list(shape)}"
            )

    def get(self, name: str) -> Tensor:
        """Read a tensor; a quantised one is dequantised to fp32.

        Raises:
            CheckpointFormatError: the tensor is missing.
            UnsupportedModelError: its type is not implemented.
            GGUFFormatError: the file was cut while it was read.
        """
        shape = self.shape(name)
        self._file.check_size()
        self._read.add(name)
        return unpack(self._file.tensors[name]).dequantize().view(shape)

    def load(self, module: Any, read: Callable[[str], Tensor], device: str) -> Any:
        """Copy the weights of a module from the file, and return it on the device.

        Args:
            module: the module.
            read: function that reads a tensor by its name in the module.
            device: device that computes.

        Raises:
            CheckpointFormatError: a tensor is missing or has another shape.
            UnsupportedModelError: its type is not implemented.
        """
        for name, parameter in module.state_dict().items():
            values = read(name)
            if values.shape != parameter.shape:
                raise CheckpointFormatError(
                    f"{self.name}: the tensor of {name!r} must have the shape {list(parameter.shape)}, "
                    f"got {list(values.shape)}"
                )
            parameter.copy_(values)
            self._file.release()
        return module.eval().requires_grad_(False).to(device)

    def check_all_read(self) -> None:
        """Check that no tensor is left: without it the encoder would see something else.

        Raises:
            UnsupportedModelError: one is left.
        """
        for name in self._file.tensors:
            if name.startswith(("v.", "mm.")) and name not in self._read:
                raise UnsupportedModelError(f"{self.name}: tensor {name!r} is not implemented")


def has_swapped_mlp(tensors: MmprojTensors, width: int) -> bool:
    """Return whether the two matrices of an MLP have each other's name, as in files of older converters.

    Args:
        tensors: tensors of the file.
        width: width of the encoder.
    """
    outputs, inputs = tensors.shape("v.blk.0.ffn_down.weight")
    return inputs == width != outputs


def mlp_width(tensors: MmprojTensors) -> int:
    """Return the inner width of the MLPs, which files of older converters do not say in their metadata."""
    return max(tensors.shape("v.blk.0.ffn_up.weight"))


def stacked(tensors: MmprojTensors, names: list[str], dim: int) -> Tensor:
    """Read tensors of one shape, stacked along a new dimension.

    Raises:
        CheckpointFormatError: a tensor is missing, or one has another shape than the first.
    """
    for name in names[1:]:
        tensors.check_shape(name, tensors.shape(names[0]))
    return torch.stack([tensors.get(name) for name in names], dim=dim)
