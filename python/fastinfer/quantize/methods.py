"""Quantisation methods by name: their numbers, and what these must be. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastinfer.errors import RequestError

if TYPE_CHECKING:
    from fastinfer.models.config import ModelConfig

# Methods that use no zero points by default: 8 bits lose nothing without them, and more programs read the result.
SYMMETRIC = ("int8", "nf4", "w8a8")
# Numbers of bits that each method supports; the first is the default.
METHODS = {
    "rtn": (4, 2, 3, 8),
    "gptq": (4, 2, 3, 8),
    "awq": (4, 3, 8),
    "nf4": (4,),
    "int8": (8,),
    "w8a8": (8,),
}
NF4_GROUP = 64


@dataclass(frozen=True)
class Method:
    """A quantisation method and its numbers.

    Attributes:
        name: a key of ``METHODS``.
        bits: number of bits of a weight.
        group_size: number of inputs that share a scale, -1 for whole rows; ignored by ``int8`` and ``w8a8``, which have
            one scale per row.
        symmetric: whether there are no zero points; must be true for ``w8a8`` and ``nf4``.

    Raises:
        RequestError: the name is unknown, or the method does not support a number.
    """

    name: str
    bits: int
    group_size: int = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise RequestError(f"method: expected one of {', '.join(METHODS)}, got {self.name!r}")
        if self.bits not in METHODS[self.name]:
            raise RequestError(f"bits: expected one of {METHODS[self.name]} for {self.name}, got {self.bits}")
        if self.group_size != -1 and (self.group_size < 32 or self.group_size % 32):
            raise RequestError(f"group_size: expected a multiple of 32, or -1 for whole rows, got {self.group_size}")
        if self.name in ("w8a8", "nf4") and not self.symmetric:
            raise RequestError(f"symmetric: expected true for {self.name}, got false")
        if self.name == "nf4" and self.group_size != NF4_GROUP:
            raise RequestError(f"group_size: expected {NF4_GROUP} for nf4, got {self.group_size}")

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale, whatever the group size."""
        return self.name in ("int8", "w8a8")

    @property
    def needs_inputs(self) -> bool:
        """Whether a calibration text changes the result."""
        return self.name in ("gptq", "awq", "w8a8")

    def check(self, config: "ModelConfig") -> None:
        """Check that the inputs of the model's layers can be divided into such groups.

        Raises:
            RequestError: the group size, or 32, does not divide a layer's number of inputs.
        """
        layers = range(config.num_layers)
        widths = {config.hidden_size} | {config.attention_size(layer) for layer in layers}
        widths |= {config.mlp_size(layer) for layer in layers if config.has_mlp(layer)}
        latent = config.latent_attention
        optional = [config.shared_intermediate_size, config.dense_intermediate_size, config.per_layer_size]
        optional.append(config.expert_latent_size)
        optional += [] if latent is None else [latent.query_rank]
        widths |= {size for size in optional if size}
        if self.group_size != -1 and not self.by_row:
            for width in sorted(width for width in widths if width % self.group_size):
                raise RequestError(
                    f"group_size: expected a divisor of every layer's inputs, {self.group_size} does not divide {width}"
                )
        for width in sorted(width for width in widths if width % 32):
            raise RequestError(f"quantised layers must have a multiple of 32 inputs, got {width}")
