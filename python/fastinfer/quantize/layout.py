"""What the layouts of quantised checkpoints have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.linear_tensors import KERNEL_GROUP
from fastinfer.formats.unpacked import Grouped, Unpacked


@dataclass(frozen=True)
class WriterSettings:
    """How all weights of a checkpoint are quantised.

    Attributes:
        bits: of an integer.
        group_size: inputs that share a scale, -1 for a whole row.
        symmetric: the zero point is the middle everywhere.
        int8_activations: for int8 weights with a scale per row and without zero points, whose inputs are rounded, too.
        double_quantization: bitsandbytes alone: scales are rounded to 8 bits, which saves 0.37 bits per weight of
            groups of 64.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    int8_activations: bool = False
    double_quantization: bool = False

    def __post_init__(self) -> None:
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % KERNEL_GROUP):
            raise QuantizationError(
                f"group_size: expected a multiple of {KERNEL_GROUP}, or -1 for whole rows, got {self.group_size}"
            )

    def check_groups(self, weight: Grouped) -> None:
        """That a weight has scales for groups of this size.

        Raises:
            QuantizationError: it has others, or its inputs cannot be cut into such groups.
        """
        _, columns = weight.shape
        size = columns if self.group_size == -1 else self.group_size
        if columns % size or size % KERNEL_GROUP:
            raise QuantizationError(
                f"expected a multiple of {max(size if columns % size else 0, KERNEL_GROUP)} inputs, got {columns}"
            )
        if weight.scales.shape[1] != columns // size:
            raise QuantizationError(
                f"expected {columns // size} scales per row for {columns} inputs, got {weight.scales.shape[1]}"
            )


class Layout(Protocol):
    """A file format of quantised weights.

    Attributes:
        leaves_out: single linear layers may stay as they are.
    """

    leaves_out: bool

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        """A weight's tensors, by what follows the module's name and a dot.

        Raises:
            QuantizationError: the format cannot hold the weight.
        """

    def config(self, left_out: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json.

        Args:
            left_out: modules that are linear layers, and not quantised.
        """


def cannot_hold(layout: str, weight: Unpacked) -> QuantizationError:
    return QuantizationError(f"{layout} cannot hold a weight of the form {type(weight).__name__} with these settings")
