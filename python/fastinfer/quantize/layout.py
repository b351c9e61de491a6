"""Interface and settings shared by the layouts of quantised checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.linear_tensors import KERNEL_GROUP
from fastinfer.formats.unpacked import Grouped, Unpacked


@dataclass(frozen=True)
class WriterSettings:
    """Quantisation of all weights of a checkpoint.

    Attributes:
        bits: number of bits of a weight.
        group_size: number of inputs that share a scale, -1 for whole rows.
        symmetric: whether every zero point is the middle level.
        int8_activations: whether the inputs are rounded to int8, too; for int8 weights with one scale per row and
            without zero points.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    int8_activations: bool = False

    def __post_init__(self) -> None:
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % KERNEL_GROUP):
            raise QuantizationError(
                f"group_size: expected a multiple of {KERNEL_GROUP}, or -1 for whole rows, got {self.group_size}"
            )

    def check_groups(self, weight: Grouped) -> None:
        """Check that a weight has scales for groups of this size.

        Raises:
            QuantizationError: the weight has other groups, or its inputs cannot be divided into such groups.
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
    """File format of quantised weights.

    Attributes:
        leaves_out: whether some linear layers may stay dense.
    """

    leaves_out: bool

    def tensors(self, weight: Unpacked) -> dict[str, Tensor]:
        """Return the tensors of a weight by their names within the module.

        Raises:
            QuantizationError: the format cannot hold the weight.
        """

    def config(self, left_out: Sequence[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of config.json.

        Args:
            left_out: names of the linear layers that are not quantised.
        """


def cannot_hold(layout: str, weight: Unpacked) -> QuantizationError:
    """Create the error for a weight whose form a layout cannot hold."""
    return QuantizationError(f"{layout} cannot hold a weight of the form {type(weight).__name__} with these settings")
