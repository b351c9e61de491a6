"""Linear layers, dense and quantised, that take what surrounds them as arguments: a norm, an activation, a residual."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.formats.unpacked import Grouped
from fastinfer.nn.exact_buffers import ExactBuffers
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.quantize.rounding import NF4_TABLE, round_to_int8, round_to_nf4, round_with_minimum
from fastinfer.weights.weight import LinearOptions

# By kind: how a weight is rounded, and the inputs that share a scale unless said otherwise.
KINDS: dict[str, tuple[Callable[[Tensor, int], Grouped], int]] = {
    "int4": (round_with_minimum, 32),
    "int8": (round_to_int8, 32),
    "nf4": (round_to_nf4, 64),
}
PACKED = ("qweight", "scales", "mins")


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`fastinfer.ops.gemm`.

    Args of ``forward``:
        x: [..., in_features].
        norm_weight, eps, activation, residual: as in :func:`fastinfer.ops.gemm`, ``residual`` in the result's shape.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "Linear":
        """A layer that shares the parameters of another."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return _by_rows(self, x, options)
        return ops.gemm(x, self.weight, bias=self.bias, **options)


class PackedWeight(Tensor):
    """Integers of a :class:`QuantLinear`, for code that asks a linear layer's weight for its device, dtype or type."""

    _is_hf_initialized = True  # or transformers would fill it with random numbers

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        raise TypeError(
            "a QuantLinear has no dense weight to read, change or merge an adapter into; merge it into the dense model "
            "and quantise that"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype})"

    def size(self, *_: Any) -> Any:
        raise TypeError("a QuantLinear's weight is no matrix that could be resized; resize the dense model's first")


class QuantLinear(ExactBuffers, nn.Linear):
    """A linear layer with a weight of 4 or 8 bits.

    The state has the packed weight, as :mod:`fastinfer.ops.pack` says for the CPU, whatever the device: ``qweight``,
    ``scales`` and, for int4, ``mins``. A state with a dense ``weight`` is accepted as well, and quantised.

    Args:
        in_features: a multiple of 32 and of ``group_size``.
        out_features: any number.
        bias: whether there is one.
        kind: ``"int4"`` (16 levels between the least and the greatest value of a group), ``"int8"`` (symmetric) or
            ``"nf4"`` (16 quantiles of a normal distribution, https://arxiv.org/abs/2305.14314).
        group_size: inputs that share a scale: a multiple of 32; 32 by default, 64 for nf4.
        activation_bits: 8, 16 or 32; how precisely the CPU's products take their input, see
            :func:`fastinfer.ops.int8_gemm`. A GPU's, and those of nf4, take it as it is.
        device: of the buffers.
        dtype: of the bias.

    Raises:
        ValueError: a size, a kind or a number of bits that there is no kernel for.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    table: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        kind: str = "int4",
        group_size: int | None = None,
        activation_bits: int = 8,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a dense weight
        if kind not in KINDS:
            raise ValueError(f"kind must be {', '.join(KINDS)}, got {kind!r}")
        if activation_bits not in (8, 16, 32):
            raise ValueError(f"activation_bits must be 8, 16 or 32, got {activation_bits}")
        group_size = group_size or default_group_size(kind, in_features)
        if group_size % 32 or in_features % group_size:
            raise ValueError(
                f"group_size must be a multiple of 32 that divides in_features, got {group_size} for {in_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.kind, self.group_size, self.activation_bits = kind, group_size, activation_bits
        tiles = -(-out_features // TILE_ROWS)
        integers = torch.int8 if kind == "int8" else torch.uint8
        runs = 8 if kind == "int8" else 4
        self.qweight = nn.Buffer(torch.empty(tiles, in_features // 32, runs, 16, 4, dtype=integers, device=device))
        self.scales = nn.Buffer(torch.empty(tiles, in_features // group_size, 16, dtype=torch.half, device=device))
        self.mins = nn.Buffer(torch.empty_like(self.scales)) if kind == "int4" else None
        self.table = nn.Buffer(NF4_TABLE.to(device), persistent=False) if kind == "nf4" else None
        values = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if values is None else nn.Parameter(values, requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The packed integers, which are no matrix."""
        return self.qweight.as_subclass(PackedWeight)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, kind: str = "int4", group_size: int | None = None, activation_bits: int = 8
    ) -> "QuantLinear":
        """Quantise a layer's weight by rounding to nearest; the bias is shared."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            kind=kind,
            group_size=group_size,
            activation_bits=activation_bits,
            bias=False,
            device="meta",
        )
        layer.bias = linear.bias
        layer.quantize(linear.weight.detach())
        return layer

    def quantize(self, weight: Tensor) -> None:
        """Take a dense weight [out_features, in_features], on whose device the layer then is."""
        for name, values in self._round(weight).items():
            setattr(self, name, values)
        self.finish_loading(cpu_layout=False)

    def finish_loading(self, cpu_layout: bool) -> None:
        """Put right what is not as :meth:`load_state_dict` leaves it, where a loader assigned the buffers.

        Args:
            cpu_layout: whether ``qweight`` came from a state, and so lies as on the CPU whatever its device.
        """
        if cpu_layout and self.qweight.is_cuda:
            self.qweight = self._pack(self._integers(self.qweight.cpu()).to(self.qweight.device))
        if self.table is not None:
            self.table = NF4_TABLE.to(self.qweight.device)

    def dequantize(self) -> Tensor:
        """The weight as numbers, [out_features, in_features] fp32."""
        scales = self.scales.transpose(1, 2).flatten(0, 1)[: self.out_features].float()[..., None]
        integers = self._integers(self.qweight)
        levels = integers.float() if self.table is None else self.table[integers.long()]
        groups = levels.unflatten(1, (-1, self.group_size)) * scales
        if self.mins is not None:
            groups += self.mins.transpose(1, 2).flatten(0, 1)[: self.out_features].float()[..., None]
        return groups.flatten(1)

    def forward(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return _by_rows(self, x, options)
        buffers: Any = self._buffers  # as attributes they cost 3 us of a product's 60
        packed = buffers["qweight"], buffers["scales"]
        if "table" in buffers:
            return ops.lut_gemm(x, *packed, buffers["table"], self.out_features, bias=self.bias, **options)
        gemm = ops.int8_gemm if self.kind == "int8" else ops.int4_gemm
        return gemm(
            x,
            *packed,
            buffers.get("mins"),
            self.out_features,
            bias=self.bias,
            activation_bits=32 if x.is_cuda else self.activation_bits,
            **options,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kind={self.kind}, group_size={self.group_size}"
        )

    def _pack(self, integers: Tensor) -> Tensor:
        return ops.int8_pack(integers) if self.kind == "int8" else ops.int4_pack(integers)

    def _round(self, weight: Tensor) -> dict[str, Tensor]:
        if weight.shape != (self.out_features, self.in_features):
            expected = (self.out_features, self.in_features)
            raise ValueError(f"weight must have the shape {expected}, got {tuple(weight.shape)}")
        rounded = KINDS[self.kind][0](weight.float(), self.group_size)
        packed = {"qweight": self._pack(rounded.q), "scales": ops.pack_scales(rounded.scales.half())}
        return packed if rounded.mins is None else packed | {"mins": ops.pack_scales(rounded.mins)}

    def _integers(self, qweight: Tensor) -> Tensor:
        """[out_features, in_features], 0..15 or -128..127, of a packed weight of this layer's size."""
        one = torch.ones_like(self.scales, device=qweight.device)
        if self.kind == "int8":
            return ops.int8_dequantize(qweight, one, None, self.out_features).to(torch.int8)
        return ops.int4_dequantize(qweight, one, torch.zeros_like(one), self.out_features).byte()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLinear":
        """A GPU has a packed form of its own."""
        packed = self.qweight
        super()._apply(fn, recurse)
        device = self.qweight.device
        if {packed.device.type, device.type} == {"cpu", "cuda"}:
            self.qweight = self._pack(self._integers(packed).to(device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.qweight.is_cuda:
            destination[prefix + "qweight"] = self._pack(self._integers(self.qweight).cpu())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "weight" in state_dict:
            weight = state_dict.pop(prefix + "weight").to(self.qweight.device)
            state_dict.update({prefix + name: values for name, values in self._round(weight).items()})
        elif self.qweight.is_cuda and prefix + "qweight" in state_dict:
            integers = self._integers(state_dict[prefix + "qweight"].cpu())
            state_dict[prefix + "qweight"] = self._pack(integers.to(self.qweight.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


def make_linear(
    linear: nn.Linear, quantize: str | None, group_size: int | None, activation_bits: int
) -> Linear | QuantLinear:
    """A layer as one of ours; one that is quantised already stays."""
    if isinstance(linear, QuantLinear):
        return linear
    if quantize is None:
        return Linear.from_linear(linear)
    return QuantLinear.from_linear(linear, quantize, group_size, activation_bits)


def default_group_size(kind: str, in_features: int) -> int:
    """The usual group of a kind, or a smaller one that divides the inputs."""
    usual = KINDS[kind][1]
    return usual if in_features % usual == 0 else 32


def _by_rows(layer: Linear | QuantLinear, x: Tensor, options: LinearOptions) -> Tensor:
    """A layer's result for [..., in_features], by way of [tokens, in_features]."""
    residual = options.get("residual")
    if residual is not None:
        options["residual"] = residual.reshape(-1, residual.shape[-1])
    out = layer.forward(x.reshape(-1, x.shape[-1]).contiguous(), **options)
    return out.view(*x.shape[:-1], out.shape[-1])
